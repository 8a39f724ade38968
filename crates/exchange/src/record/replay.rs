//! Reads a record and repeats its decision. No proxy does this.

use scheduler::in_flight::{EndpointLoad, InFlight, PendingPrefills};
use scheduler::latency::Prediction;
use scheduler::metrics::METRICS;
use scheduler::prefix::REQUESTED_ONCE;
use scheduler::{
    AdapterRoom, Decision, ENDPOINTS_MAX, Endpoint, EndpointMetrics, Explanation, LocalState,
    LoraMetrics, Readiness, Request, Rng, Snapshot, SubsetHint, Version, schedule_again,
};
use serde_json::Value;

/// The maximum size of a record that is read, in bytes: enough for
/// [`super::RECORDED_ENDPOINTS_MAX`] endpoints with all their adapters' names.
pub const RECORD_BYTES_MAX: usize = 4 << 20;

#[derive(Clone, Debug, PartialEq)]
pub struct ParsedRecord {
    value: Value,
}

/// The reason why a text is not a record, or cannot be replayed. The caller has to correct the
/// text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InvalidRecord {
    /// The text is longer than [`RECORD_BYTES_MAX`].
    TooLong(usize),
    /// The text is not JSON.
    NotJson(String),
    /// A field is missing, or of another type.
    Field(&'static str),
    /// The endpoints in the record do not form a valid pool.
    Endpoints(String),
}

/// A decision that was repeated.
#[derive(Debug)]
pub struct ReplayedDecision {
    /// The pool at the time of the decision.
    pub snapshot: Snapshot,
    pub decision: Decision,
    /// The reasons for the decision.
    pub explanation: Explanation,
}

// === impl ParsedRecord ===

impl ParsedRecord {
    /// Reads the text of [`super::DecisionRecord::to_json`].
    ///
    /// # Errors
    /// Returns [`InvalidRecord`] if the text is not a record. Fields are checked only by
    /// [`Self::replay`].
    pub fn from_json(text: &str) -> Result<Self, InvalidRecord> {
        if text.len() > RECORD_BYTES_MAX {
            return Err(InvalidRecord::TooLong(text.len()));
        }
        let value: Value =
            serde_json::from_str(text).map_err(|e| InvalidRecord::NotJson(e.to_string()))?;
        if value.get("rng").is_none() {
            return Err(InvalidRecord::Field("rng"));
        }
        Ok(Self { value })
    }

    /// Returns the endpoints that the recorded decision picked, if the record has them.
    #[must_use]
    pub fn was_picked(&self) -> Vec<&str> {
        self.value["picked"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect()
    }

    /// Repeats the decision with the pipeline, objects and labels of `live`, and without the
    /// endpoints that `without` names.
    ///
    /// # Errors
    /// [`InvalidRecord`] names the field that is missing or wrong.
    pub fn replay(
        &self,
        live: &Snapshot,
        without: &[String],
    ) -> Result<ReplayedDecision, InvalidRecord> {
        let request = RecordedRequest::read(
            self.value
                .get("request")
                .ok_or(InvalidRecord::Field("request"))?,
        )?;
        let pool = RecordedPool::read(&self.value, live, without)?;
        let mut in_flight = InFlight::default();
        let refs: Vec<_> = pool.endpoints.iter().map(|e| e.id).collect();
        in_flight.others_mut().start(&refs);
        refs.iter()
            .zip(&pool.loads)
            .for_each(|(id, load)| in_flight.others_mut().add(*id, *load));
        refs.iter()
            .zip(&pool.last_picks)
            .for_each(|(id, pick)| in_flight.picked_at(*id, *pick));
        let snapshot = live
            .with_endpoints(pool.version, pool.endpoints, pool.metrics)
            .map_err(|invalid| InvalidRecord::Endpoints(invalid.to_string()))?;
        // Every field is named here, so a new field does not compile until a record has it.
        let local = LocalState {
            in_flight: &in_flight,
            matched_blocks: &pool.matched_blocks,
            ejected: &pool.ejected,
            failing: &pool.failing,
            last_answers: &pool.last_answers,
            last_cold_picks: &pool.cold_picks,
            adapter_rooms: &pool.adapter_rooms,
            reuse_interval: real(&self.value["reuse_interval"]).unwrap_or(REQUESTED_ONCE),
            evicted_share: real(&self.value["evicted_share"]).unwrap_or(0.0),
            metrics_stale: flag(&self.value, "metrics_stale")?,
            // The flag matters only for the rendezvous endpoint, which depends on prompt hashes,
            // and records contain no hashes.
            peers_unreachable: false,
        };
        let mut rng = Rng::seeded(number(&self.value, "rng")?);
        let mut explanation = Explanation::default();
        let predicted = pool.predicted;
        let decision = request.with(|request| {
            schedule_again(
                &snapshot,
                request,
                local,
                predicted,
                &mut rng,
                Some(&mut explanation),
            )
        });
        Ok(ReplayedDecision {
            snapshot,
            decision,
            explanation,
        })
    }
}

/// A request's facts, owned.
struct RecordedRequest<'a> {
    value: &'a Value,
    subset: Option<SubsetHint>,
    blocks: Vec<u64>,
    headers: Vec<(&'a str, &'a str)>,
}

/// The inputs of `schedule` about the pool. The fields are the columns of a table that has one row
/// for each endpoint, as `schedule` takes them.
#[derive(Default)]
struct RecordedPool {
    version: Version,
    endpoints: Vec<Endpoint>,
    metrics: Vec<EndpointMetrics>,
    loads: Vec<EndpointLoad>,
    matched_blocks: Vec<u32>,
    ejected: Vec<bool>,
    failing: Vec<f32>,
    last_answers: Vec<u64>,
    cold_picks: Vec<u64>,
    last_picks: Vec<u64>,
    adapter_rooms: Vec<AdapterRoom>,
    predicted: Vec<Option<Prediction>>,
}

// === impl RecordedRequest ===

impl<'a> RecordedRequest<'a> {
    fn read(value: &'a Value) -> Result<Self, InvalidRecord> {
        let count = usize::try_from(number::<u64>(value, "blocks")?)
            .unwrap_or(usize::MAX)
            .min(scheduler::prefix::BLOCKS_MAX);
        let blocks = vec![0; count];
        let subset = value["subset"]
            .as_str()
            .map(|text| SubsetHint::parse(text.split(',')));
        let headers = value["headers"].as_object().into_iter().flatten();
        let headers = headers
            .filter_map(|(name, value)| Some((name.as_str(), value.as_str()?)))
            .collect();
        Ok(Self {
            value,
            subset,
            blocks,
            headers,
        })
    }

    fn with<R>(&self, decide: impl FnOnce(&Request<'_>) -> R) -> R {
        let count = |name| count(self.value, name);
        decide(&Request {
            model: self.value["model"].as_str().unwrap_or_default(),
            subset: self.subset.as_ref(),
            priority: self.value["priority"]
                .as_i64()
                .and_then(|n| n.try_into().ok())
                .unwrap_or(0),
            prompt_tokens: count("prompt_tokens").unwrap_or(0),
            prefix_blocks: &self.blocks,
            prefix_block_tokens: count("block_tokens").unwrap_or(0),
            max_tokens: count("max_tokens"),
            media_items: count("media_items").unwrap_or(0),
            headers: &self.headers,
            slo: scheduler::Slo {
                ttft_us: count("slo_ttft_us"),
                tpot_us: count("slo_tpot_us"),
            },
            prediction_based: self.value["prediction_based"].as_bool().unwrap_or(false),
            stored_id: 0, // the subset has the endpoint that it led to
            client: 0,    // the endpoints that it avoids are marked
        })
    }
}

// === impl RecordedPool ===

impl RecordedPool {
    fn read(value: &Value, live: &Snapshot, without: &[String]) -> Result<Self, InvalidRecord> {
        let rows = value["endpoints"]
            .as_array()
            .ok_or(InvalidRecord::Field("endpoints"))?;
        let version = value["version"].as_array().map(Vec::as_slice);
        let Some([term, sequence]) = version else {
            return Err(InvalidRecord::Field("version"));
        };
        let mut pool = Self {
            version: Version {
                term: term.as_u64().unwrap_or(0),
                sequence: sequence.as_u64().unwrap_or(0),
            },
            ..Self::default()
        };
        for row in rows {
            let address = row["endpoint"]
                .as_str()
                .ok_or(InvalidRecord::Field("endpoints.endpoint"))?;
            if !without.iter().any(|excluded| excluded == address) {
                pool.push(address, row, live)?;
            }
        }
        Ok(pool)
    }

    fn push(&mut self, address: &str, row: &Value, live: &Snapshot) -> Result<(), InvalidRecord> {
        let known = live.endpoints().iter().find(|e| &*e.address == address);
        let ready = if flag(row, "ready")? {
            Readiness::Ready
        } else {
            Readiness::NotReady
        };
        // Older records have no slots. Any identity that distinguishes the endpoints works.
        let position = u16::try_from(self.endpoints.len()).unwrap_or(u16::MAX);
        self.endpoints.push(Endpoint {
            id: scheduler::EndpointRef {
                slot: scheduler::Slot(number(row, "slot").unwrap_or(position)),
                generation: scheduler::Generation(number(row, "generation").unwrap_or(0)),
            },
            name: row["name"].as_str().unwrap_or(address).into(),
            address: address.into(),
            readiness: ready,
            labels: known.map(|e| e.labels.clone()).unwrap_or_default(),
            models: known.map(|e| e.models.clone()).unwrap_or_default(),
            age_ms: number(row, "age_ms")?,
        });
        self.metrics.push(metrics(row));
        self.loads.push(EndpointLoad {
            requests: number(row, "requests")?,
            prefill_tokens: number(row, "prefill_tokens")?,
            decode_tokens: number(row, "decode_tokens")?,
            prefills: prefills(row),
            ttft_slo_us: count(row, "ttft_slo_us"),
            tpot_slo_us: count(row, "tpot_slo_us"),
        });
        self.matched_blocks.push(number(row, "matched_blocks")?);
        self.ejected.push(row["ejected"].as_bool().unwrap_or(false));
        self.failing.push(real(&row["failing"]).unwrap_or(0.0));
        self.answered_last(row);
        self.cold_picks.push(number(row, "cold_pick")?);
        // Older records have no last picks. Equal costs are then decided at random.
        self.last_picks.push(number(row, "last_pick").unwrap_or(0));
        self.adapter_rooms
            .push(read_adapter_room(&row["adapter_room"]));
        self.predicted.push(prediction(row));
        Ok(())
    }

    /// Reads the last answer of the endpoint that was added last. Older records do not have it.
    fn answered_last(&mut self, row: &Value) {
        let Some(slot) = self
            .endpoints
            .last()
            .map(|endpoint| usize::from(endpoint.id.slot.0))
            .filter(|slot| *slot < ENDPOINTS_MAX)
        else {
            return;
        };
        if self.last_answers.len() <= slot {
            self.last_answers.resize(slot + 1, 0);
        }
        if let Some(last) = self.last_answers.get_mut(slot) {
            *last = number(row, "last_answer").unwrap_or(0);
        }
    }
}

fn prediction(row: &Value) -> Option<Prediction> {
    match row["predicted"].as_array()?.as_slice() {
        [ttft, tpot, ttft_p90, tpot_p90] => Some(Prediction {
            ttft_ms: real(ttft)?,
            tpot_ms: real(tpot)?,
            ttft_p90_ms: real(ttft_p90)?,
            tpot_p90_ms: real(tpot_p90)?,
        }),
        _ => None,
    }
}

fn read_adapter_room(value: &Value) -> AdapterRoom {
    match (value.as_str(), value.as_u64()) {
        (Some("loaded"), _) => AdapterRoom::Loaded,
        (Some("free"), _) => AdapterRoom::Free,
        (_, Some(displaced_used)) => AdapterRoom::Full { displaced_used },
        _ => AdapterRoom::Unknown,
    }
}

/// Reads the pending prefills; 0 for values that an older release did not record.
fn prefills(row: &Value) -> PendingPrefills {
    let sum = |name| number(row, name).unwrap_or(0);
    PendingPrefills {
        prompts: count(row, "prefill_prompts").unwrap_or(0),
        prompt_tokens: sum("prefill_prompt_tokens"),
        uncached_tokens: sum("prefill_uncached_tokens"),
        attention: sum("prefill_attention"),
    }
}

fn metrics(row: &Value) -> EndpointMetrics {
    let names = |value: &Value| -> Box<[Box<str>]> {
        let names = value.as_array().into_iter().flatten();
        names.filter_map(Value::as_str).map(Into::into).collect()
    };
    let lora = row.get("lora").map(|lora| LoraMetrics {
        running: names(&lora["running"]),
        waiting: names(&lora["waiting"]),
        max: count(lora, "max").unwrap_or(0),
        base_models: names(&lora["base_models"]),
    });
    let attributes = row["attributes"].as_object().into_iter().flatten();
    let attributes = attributes
        .filter_map(|(key, value)| Some((key.as_str().into(), real(value)?)))
        .collect();
    let mut metrics = EndpointMetrics {
        lora,
        attributes,
        ..EndpointMetrics::default()
    };
    METRICS
        .iter()
        .for_each(|metric| (metric.set)(&mut metrics, real(&row[metric.name])));
    metrics
}

fn number<T: TryFrom<u64>>(row: &Value, name: &'static str) -> Result<T, InvalidRecord> {
    row[name]
        .as_u64()
        .and_then(|n| T::try_from(n).ok())
        .ok_or(InvalidRecord::Field(name))
}

fn count(row: &Value, name: &'static str) -> Option<u32> {
    number(row, name).ok()
}

fn flag(row: &Value, name: &'static str) -> Result<bool, InvalidRecord> {
    row[name].as_bool().ok_or(InvalidRecord::Field(name))
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "it was written from an f32"
)]
fn real(value: &Value) -> Option<f32> {
    value.as_f64().map(|number| number as f32)
}

// === impl InvalidRecord ===

impl std::fmt::Display for InvalidRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::TooLong(bytes) => {
                write!(f, "{bytes} bytes, a record has at most {RECORD_BYTES_MAX}")
            }
            Self::NotJson(why) => write!(f, "not JSON: {why}"),
            Self::Field(name) => write!(
                f,
                "not a decision record: `{name}` is missing, or not what it should be"
            ),
            Self::Endpoints(why) => write!(f, "its endpoints make no pool: {why}"),
        }
    }
}

impl std::error::Error for InvalidRecord {}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_row_is_read_as_it_is_written() {
        let rooms = [json!("loaded"), json!("free"), json!(7), json!(null)]
            .map(|room| read_adapter_room(&room));
        assert_eq!(
            rooms,
            [
                AdapterRoom::Loaded,
                AdapterRoom::Free,
                AdapterRoom::Full { displaced_used: 7 },
                AdapterRoom::Unknown
            ]
        );
        let predicted = Prediction {
            ttft_ms: 1.5,
            tpot_ms: 2.0,
            ttft_p90_ms: 3.0,
            tpot_p90_ms: 4.0,
        };
        assert_eq!(
            prediction(&json!({ "predicted": [1.5, 2, 3, 4] })),
            Some(predicted)
        );
        assert_eq!(
            [
                json!({}),
                json!({ "predicted": null }),
                json!({ "predicted": [1, 2, 3] })
            ]
            .map(|row| prediction(&row)),
            [None; 3]
        );
        let row = json!({ "prefill_prompts": 1, "prefill_prompt_tokens": 2, "prefill_uncached_tokens": 3, "prefill_attention": 4 });
        assert_eq!(
            prefills(&row),
            PendingPrefills {
                prompts: 1,
                prompt_tokens: 2,
                uncached_tokens: 3,
                attention: 4
            }
        );
        assert_eq!(prefills(&json!({})), PendingPrefills::default());
    }
}
