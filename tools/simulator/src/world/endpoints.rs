//! Engines as a pool has them: endpoints, and their LoRA metrics.

use std::sync::Arc;

use scheduler::{Endpoint, EndpointRef, Generation, LoraMetrics, ROLE_LABEL, Readiness, Slot};

use super::setting::{PoolSetting, SettingChange};
use crate::engine::EngineSimulator;
use crate::router::adapter_name;

/// The LoRA metrics of an engine with places for adapters.
pub(super) fn lora(engine: &dyn EngineSimulator<'_>) -> Option<LoraMetrics> {
    let max = u32::try_from(engine.spec().adapter_places)
        .ok()
        .filter(|&places| places > 0)?;
    let names = |adapters: Vec<u16>| {
        adapters
            .into_iter()
            .map(|adapter| adapter_name(adapter).into())
            .collect()
    };
    let (running, waiting) = engine.adapters();
    Some(LoraMetrics {
        running: names(running),
        waiting: names(waiting),
        max,
        base_models: [].into(),
    })
}

/// The endpoint of an engine, by its position.
pub(super) fn endpoint(at: usize, setting: &PoolSetting) -> Endpoint {
    let added = match setting.change {
        Some(SettingChange::Grows) => 2,
        Some(SettingChange::KillAddRestart { .. }) => 1,
        _ => 0,
    };
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
        readiness: if at + added >= setting.replicas {
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
