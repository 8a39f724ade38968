//! Simulates one inference engine with the scheduling of vLLM: continuous batching, chunked
//! prefill, first come first served, paged KV memory with a prefix cache, preemption by recompute,
//! and LoRA adapters.
//!
//! The engine is a state machine that reads no clock. The caller passes the time, starts a step
//! with [`BatchingEngine::start`], and ends the step with [`BatchingEngine::end`] at the time that
//! `start` returned. The testbed's model server drives the engine in real time, and the simulator
//! drives it in virtual time.
//!
//! All times are in milliseconds of engine time.
#![deny(clippy::indexing_slicing)]
#![forbid(unsafe_code)]

mod adapters;
mod blocks;
mod engine;
mod profile;
mod sequence;
mod step_time;
#[cfg(test)]
mod tests;

pub use engine::{BatchingEngine, EngineStep, SequenceProgress, SimulatedEngineSpec};
pub use profile::EngineProfile;
pub use sequence::{EngineRequest, EngineSequence};
pub use step_time::{StepBatch, StepTimeModel};
