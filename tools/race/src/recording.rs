//! Plays a piece of a public trace. Each request of the trace becomes a session.

use race_cells::{RaceSession, SessionClass, Turn};
use testbed::{Result, root, trace};

/// The longest prompt that the race plays, in tokens. A tenth of the trace's prompts are longer,
/// and do not fit into the context length in the rivals' examples.
const PROMPT_TOKENS_MAX: usize = 32_000;

/// Returns the requests of the first `arrivals_s` seconds as sessions. The times in the trace are
/// multiples of 3 s, so `seed` spreads the requests within these 3 s.
///
/// # Errors
/// Fails if the file cannot be read.
pub fn sessions(seed: u64, arrivals_s: f64) -> Result<Vec<RaceSession>> {
    let arrivals = trace::read(
        &root().join("tools/testbed/data/mooncake_conversation_10min.jsonl.gz"),
        seed,
    )?;
    let played = arrivals
        .into_iter()
        .filter(|arrival| arrival.prompt_tokens <= PROMPT_TOKENS_MAX);
    let session = |(id, arrival): (u32, trace::Arrival)| {
        let output_tokens = u32::try_from(arrival.output_tokens).unwrap_or(u32::MAX);
        let turns = vec![Turn {
            text: arrival.prompt().into(),
            output_tokens,
            pause_ms: 0.0,
        }];
        RaceSession {
            id,
            start_ms: arrival.at.as_secs_f64() * 1e3,
            class: SessionClass::Interactive,
            system: "".into(),
            turns,
        }
    };
    Ok((0..)
        .zip(played.take_while(|arrival| arrival.at.as_secs_f64() < arrivals_s))
        .map(session)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_minutes_are_some_300_requests_in_order() {
        let sessions = sessions(101, 120.0).expect("the trace");
        assert!(
            (250..350).contains(&sessions.len())
                && sessions.is_sorted_by(|a, b| a.start_ms <= b.start_ms),
            "{}",
            sessions.len()
        );
    }
}
