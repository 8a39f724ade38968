//! Converts the learned models of a pool from and to their message. Each model checks its numbers.
//! A message is used as a whole or not at all.

use scheduler::Version;
use scheduler::latency::LatencyModel;
use scheduler::latency::step::StepModel;

use crate::decode::version;
use crate::{InvalidState, state};

/// The largest message of learned models, in bytes. The size is limited because the daemon sends
/// the message to every proxy of a pool, every few seconds while it learns.
pub const LEARNED_BYTES_MAX: usize = 64 << 10;

/// The maximum size of a message without its models (names, versions, lengths), in bytes.
const ENVELOPE_BYTES: usize = 2_048;

/// The learned models of a pool.
#[derive(Clone, Debug, PartialEq)]
pub struct LearnedModels {
    pub pool: String,
    /// The version of the models. The daemon numbers models and pool updates in one sequence.
    pub version: Version,
    /// The step model of the pool's engines.
    pub step: StepModel,
    /// The latency model, if latency prediction is configured and enough requests were observed.
    pub latency: Option<LatencyModel>,
    /// Whether the models were learned from few or no requests, because the daemon has just
    /// started.
    pub provisional: bool,
}

/// Encodes these models; `None` if the message would be larger than [`LEARNED_BYTES_MAX`], because
/// every reader refuses a larger message.
#[must_use]
pub fn encode_learned(learned: &LearnedModels) -> Option<state::LearnedModels> {
    let LearnedModels {
        pool,
        version,
        step,
        latency,
        provisional,
    } = learned;
    let message = state::LearnedModels {
        pool: pool.clone(),
        version: Some(state::Version {
            term: version.term,
            sequence: version.sequence,
        }),
        step: step.words(),
        latency: latency
            .as_ref()
            .map(LatencyModel::words)
            .unwrap_or_default(),
        provisional: *provisional,
    };
    fits(&message).then_some(message)
}

/// Decodes learned models.
///
/// # Errors
/// Returns [`InvalidState`] if the message breaks a rule. In this case no part of the message may
/// be used.
pub fn learned(message: state::LearnedModels) -> Result<LearnedModels, InvalidState> {
    let version = version(message.version.as_ref(), "version")?;
    if !fits(&message) {
        return Err(InvalidState::OutOfRange("learned"));
    }
    let step = StepModel::from_words(&message.step).map_err(InvalidState::Model)?;
    let latency = if message.latency.is_empty() {
        None
    } else {
        Some(LatencyModel::from_words(&message.latency).map_err(InvalidState::Model)?)
    };
    Ok(LearnedModels {
        pool: message.pool,
        version,
        step,
        latency,
        provisional: message.provisional,
    })
}

fn fits(message: &state::LearnedModels) -> bool {
    let words = message.step.len().saturating_add(message.latency.len());
    words.saturating_mul(4) <= LEARNED_BYTES_MAX - ENVELOPE_BYTES
        && message.pool.len() < ENVELOPE_BYTES / 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;
    use scheduler::{ENDPOINTS_MAX, EndpointRef, Generation, Slot};

    fn endpoints(count: usize) -> impl Iterator<Item = EndpointRef> {
        (0..count).map(|slot| EndpointRef {
            slot: Slot(u16::try_from(slot).unwrap()),
            generation: Generation(u32::MAX),
        })
    }

    fn learned_of(count: usize) -> LearnedModels {
        let step = endpoints(count).fold(StepModel::default(), |step, endpoint| {
            step.with_speed(endpoint, 2.0, 0.5)
        });
        let latency = endpoints(count)
            .fold(LatencyModel::constant(120.0, 9.0), |model, endpoint| {
                model.with_endpoint(endpoint, 2.0, 0.5)
            });
        LearnedModels {
            pool: "default".to_owned(),
            version: Version {
                term: u64::MAX,
                sequence: 7,
            },
            step,
            latency: Some(latency),
            provisional: false,
        }
    }

    #[test]
    fn what_was_learned_arrives_as_it_was_and_the_largest_pool_fits_in_64_kb() {
        for count in [0, 1, ENDPOINTS_MAX] {
            let sent = learned_of(count);
            let bytes = encode_learned(&sent).unwrap().encode_to_vec();
            assert!(
                bytes.len() <= LEARNED_BYTES_MAX,
                "{count} endpoints are {} bytes",
                bytes.len()
            );
            assert_eq!(
                learned(state::LearnedModels::decode(&*bytes).unwrap()),
                Ok(sent)
            );
        }
        let without = LearnedModels {
            latency: None,
            provisional: true,
            ..learned_of(3)
        };
        assert_eq!(learned(encode_learned(&without).unwrap()), Ok(without));
    }

    #[test]
    fn what_is_no_model_is_refused_whole() {
        let good = || encode_learned(&learned_of(2)).unwrap();
        type LearnedEdit = fn(&mut state::LearnedModels);
        let spoilt: [(&str, LearnedEdit); 8] = [
            ("`version` is missing", |m| m.version = None),
            ("is not known", |m| m.step.clear()),
            ("is not known", |m| m.step[0] ^= 1),
            ("is not a number that it may be", |m| {
                m.step[1] = f32::NAN.to_bits();
            }),
            ("is not a number that it may be", |m| {
                m.latency[2] = f32::INFINITY.to_bits();
            }),
            ("is not a number that it may be", |m| {
                *m.latency.last_mut().unwrap() = 1e30_f32.to_bits();
            }),
            ("are no model", |m| m.latency.truncate(9)),
            ("`learned` is out of range", |m| {
                m.latency.resize(LEARNED_BYTES_MAX, 0);
            }),
        ];
        for (why, spoil) in spoilt {
            let mut message = good();
            spoil(&mut message);
            let refused = learned(message).unwrap_err().to_string();
            assert!(refused.contains(why), "{why}: {refused}");
        }
    }
}
