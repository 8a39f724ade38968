//! The scaling signal, and the external scaler for KEDA.

use std::time::Duration;

use clap::Args;
use learning::scaling::ScalingGoal;
use scheduler::ENDPOINTS_MAX;

use super::OptionalAddress;
use super::values::{duration, listen};

/// The goal that desired replicas are computed for. A trigger of KEDA may set its own.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "The scaling signal")]
pub struct ScalingArgs {
    /// The TTFT that requests must get with the desired replicas.
    #[arg(long, env = "SWITCHPOINT_SCALE_TTFT", value_name = "DURATION", default_value = "2s", value_parser = duration)]
    pub scale_ttft: Duration,

    /// The time within which the desired replicas work off a backlog.
    #[arg(long, env = "SWITCHPOINT_SCALE_DRAIN", value_name = "DURATION", default_value = "1m", value_parser = duration)]
    pub scale_drain: Duration,

    /// The time that a new replica needs before its first request: scheduling, pulling the image,
    /// loading the model. Replicas for the backlog that grows in that time are requested at once.
    #[arg(long, env = "SWITCHPOINT_SCALE_STARTUP", value_name = "DURATION", default_value = "1m", value_parser = duration)]
    pub scale_startup: Duration,

    /// Spare replicas beyond those that a steady load needs, for load that rises faster than a
    /// replica starts. The number may have a fraction; only the total of desired replicas is
    /// rounded up, by the autoscaler.
    #[arg(long, env = "SWITCHPOINT_SCALE_SPARE", value_name = "REPLICAS", default_value = "1", value_parser = spare)]
    pub scale_spare: f64,

    /// The minimum number of desired replicas.
    #[arg(long, env = "SWITCHPOINT_SCALE_MIN", value_name = "COUNT", default_value_t = 1, value_parser = replicas())]
    pub scale_min: u32,

    /// The maximum number of desired replicas.
    #[arg(long, env = "SWITCHPOINT_SCALE_MAX", value_name = "COUNT", default_value_t = REPLICAS_MAX, value_parser = replicas())]
    pub scale_max: u32,

    /// Address of the external scaler for KEDA (gRPC without TLS), usually 0.0.0.0:9005, or `none`.
    /// The scaler reveals no more than the metrics listener.
    #[arg(long, env = "SWITCHPOINT_LISTEN_SCALER", value_name = "IP:PORT", default_value = "none", value_parser = listen)]
    pub listen_scaler: OptionalAddress,
}

/// The maximum number of endpoints of a pool.
#[expect(clippy::cast_possible_truncation, reason = "1,024")]
const REPLICAS_MAX: u32 = ENDPOINTS_MAX as u32;

fn replicas() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(0..=i64::from(REPLICAS_MAX))
}

/// Reads a number of spare replicas.
///
/// # Errors
/// Fails if the text is not such a number.
pub fn spare(text: &str) -> Result<f64, String> {
    let read = text
        .parse()
        .ok()
        .filter(|replicas| (0.0..=f64::from(REPLICAS_MAX)).contains(replicas));
    read.ok_or_else(|| format!("give a number from 0 to {REPLICAS_MAX}"))
}

// === impl ScalingArgs ===

impl ScalingArgs {
    /// Returns the scaling goal that these options set.
    #[must_use]
    pub fn goal(&self) -> ScalingGoal {
        ScalingGoal {
            ttft_s: self.scale_ttft.as_secs_f64(),
            drain_s: self.scale_drain.as_secs_f64(),
            startup_s: self.scale_startup.as_secs_f64(),
            spare: self.scale_spare,
            replicas: (self.scale_min, self.scale_max),
        }
    }
}
