//! The endpoints of the simulated engines.

use std::sync::Arc;

use scheduler::{Endpoint, EndpointRef, Generation, ROLE_LABEL, Readiness, Slot};

use super::setting::PoolSetting;

/// Returns the endpoint of the engine at this position.
pub(super) fn endpoint(at: usize, setting: &PoolSetting) -> Endpoint {
    let role = (setting.prefillers > 0).then_some(if at < setting.prefillers {
        "prefill"
    } else {
        "decode"
    });
    Endpoint {
        id: EndpointRef {
            slot: Slot(u16::try_from(at).unwrap_or(u16::MAX)),
            generation: Generation(1),
        },
        name: format!("engine-{at}").into(),
        address: format!("10.0.{}.{}:8000", at / 250, at % 250 + 1).into(),
        readiness: if setting.change.is_some() && at + 1 == setting.replicas {
            Readiness::NotReady
        } else {
            Readiness::Ready
        },
        labels: role
            .map(|role| (ROLE_LABEL.into(), role.into()))
            .into_iter()
            .collect(),
        models: Arc::default(),
        age_ms: 60_000,
    }
}
