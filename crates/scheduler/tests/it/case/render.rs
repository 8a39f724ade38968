//! Renders the outcome of a case as text, in the form of its file.

use std::fmt::Write;

use scheduler::{Decision, DroppedEndpoint, EndpointIndex, ProfileExplanation};

use super::{CaseDecision, Digits};

// === impl CaseDecision ===

impl CaseDecision {
    /// Returns the ranked list, best first. The list is empty if the decision is not a route.
    pub fn ranked(&self) -> Vec<usize> {
        match &self.decision {
            Decision::Route(route) => route.ranked.iter().map(EndpointIndex::get).collect(),
            Decision::Shed(_) | Decision::Unavailable(_) | Decision::UnknownProfile(_) => {
                Vec::new()
            }
        }
    }

    /// Returns all endpoints dropped by a profile or before it.
    pub fn dropped<'o>(
        &'o self,
        profile: &'o ProfileExplanation,
    ) -> impl Iterator<Item = &'o DroppedEndpoint> {
        self.explanation.dropped.iter().chain(&profile.dropped)
    }

    /// Returns the decision, and a table for each profile that ran: dropped endpoints with the
    /// plugin that dropped them, scores and totals.
    pub fn render(&self, digits: Digits) -> String {
        let none = [ProfileExplanation::default()];
        let profiles = if self.explanation.profiles.is_empty() {
            &none[..]
        } else {
            &self.explanation.profiles
        };
        let mut text = self.headline();
        for profile in profiles {
            let title = if profiles.len() > 1 {
                format!("\n\nprofile {}", profile.name)
            } else {
                "\n".to_owned()
            };
            text.push_str(&format!(
                "{title}\n{}",
                self.table(profile, digits).trim_end()
            ));
        }
        if !self.explanation.predictions.is_empty() {
            text.push_str(&format!("\n\n{}", self.prospects(digits).trim_end()));
        }
        text.push('\n');
        text
    }

    /// Returns the predictions at each endpoint, in ms, and their headroom.
    fn prospects(&self, digits: Digits) -> String {
        let ms = |value: f32| match digits {
            Digits::Few => format!("{value:.1}"),
            Digits::All => format!("{value}"),
        };
        let mut table = vec![
            ["endpoint", "TTFT", "headroom", "TPOT", "headroom", "valid"]
                .map(str::to_owned)
                .to_vec(),
        ];
        for (name, prospect) in self.names.iter().zip(&self.explanation.predictions) {
            table.push(match prospect {
                Ok(prospect) => {
                    let [ttft, tpot] = [prospect.ttft, prospect.tpot]
                        .map(|time| [ms(time.predicted_ms), ms(time.left_ms())]);
                    let valid = match (prospect.meets(), prospect.idle) {
                        (true, _) => "yes",
                        (false, true) => "yes, idle",
                        (false, false) => "no",
                    };
                    [[name.clone()].as_slice(), &ttft, &tpot, &[valid.to_owned()]].concat()
                }
                Err(why) => vec![name.clone(), why.reason().to_owned()],
            });
        }
        aligned(&table)
    }

    fn table(&self, profile: &ProfileExplanation, digits: Digits) -> String {
        let score = |value: f32| match digits {
            Digits::Few => format!("{value:.3}"),
            Digits::All => format!("{value}"),
        };
        let mut header = vec!["endpoint".to_owned(), "dropped by".to_owned()];
        header.extend(
            profile
                .scores
                .iter()
                .map(|column| format!("{} x {}", column.weight, column.scorer)),
        );
        header.push("total".to_owned());
        let mut table = vec![header];
        for (at, name) in self.names.iter().enumerate() {
            let is = |index: &EndpointIndex| index.get() == at;
            let dropped = self
                .dropped(profile)
                .find(|drop| is(&drop.endpoint))
                .map(|drop| drop.by.to_string());
            let cell = |scores: &[(EndpointIndex, f32)]| {
                scores
                    .iter()
                    .find(|(index, _)| is(index))
                    .map(|(_, value)| score(*value))
            };
            let mut cells = vec![Some(name.clone()), dropped];
            cells.extend(profile.scores.iter().map(|column| cell(&column.scores)));
            cells.push(cell(&profile.totals));
            table.push(
                cells
                    .into_iter()
                    .map(|cell| cell.unwrap_or_else(|| "-".to_owned()))
                    .collect(),
            );
        }
        aligned(&table)
    }

    fn headline(&self) -> String {
        let name = |at: EndpointIndex| self.names.get(at.get()).map_or("?", String::as_str);
        match &self.decision {
            Decision::Route(route) => {
                let names: Vec<&str> = self
                    .ranked()
                    .iter()
                    .filter_map(|&at| self.names.get(at))
                    .map(String::as_str)
                    .collect();
                let mut text = format!("route to {}", names.join(", then "));
                if let Some(prefill) = route.prefill {
                    let _ = write!(text, "\nprefill on {}", name(prefill));
                }
                if !route.encode.is_empty() {
                    let _ = write!(
                        text,
                        "\nencode on {}",
                        route
                            .encode
                            .iter()
                            .copied()
                            .map(name)
                            .collect::<Vec<_>>()
                            .join(" and ")
                    );
                }
                if let Some(rank) = route.data_parallel {
                    let _ = write!(text, "\ndata-parallel rank {}", name(rank));
                }
                text
            }
            Decision::Shed(why) => format!("shed: {why:?}"),
            Decision::Unavailable(why) => format!("unavailable: {why:?}"),
            Decision::UnknownProfile(name) => format!("unknown profile: {name}"),
        }
    }
}

fn aligned(table: &[Vec<String>]) -> String {
    let width = |column: usize| {
        table
            .iter()
            .filter_map(|row| row.get(column))
            .map(String::len)
            .max()
            .unwrap_or(0)
    };
    let mut text = String::new();
    for row in table {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let _ = write!(line, "{cell:<width$}", width = width(column) + 2);
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}
