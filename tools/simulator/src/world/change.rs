//! Changes of the pool during a run: engines die, return and are added.

use scheduler::{Endpoint, Readiness, Version};

use super::{FAILED_MS, SettingChange, SimulatedRequest, Simulation, WorldEvent};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum PoolChange {
    /// An engine dies with its requests and its cache. The proxies notice this immediately, because
    /// the streams break.
    Dies { engine: usize },
    /// An engine becomes available, or available again after its death, with an empty cache.
    Returns { engine: usize },
}

/// The time for which an engine that restarts is away, in ms.
const REVIVAL_MS: f64 = 5_000.0;

impl Simulation<'_> {
    /// Plans the pool changes of the setting.
    pub(super) fn plan_changes(&mut self) {
        let Some(SettingChange {
            arrivals_ms,
            failover,
        }) = self.setting.change
        else {
            return;
        };
        let mut plan = |at: f64, change| self.events.plan(at, WorldEvent::Changes(change));
        let last = self.setting.replicas - 1;
        plan(0.25 * arrivals_ms, PoolChange::Dies { engine: 0 });
        plan(0.5 * arrivals_ms, PoolChange::Returns { engine: last });
        plan(0.75 * arrivals_ms, PoolChange::Dies { engine: 1 });
        if failover.readmits {
            plan(
                0.75 * arrivals_ms + REVIVAL_MS,
                PoolChange::Returns { engine: 1 },
            );
        }
    }

    /// Applies a change. Returns how many requests ended with the change.
    pub(super) fn changes(&mut self, change: PoolChange, now: f64) -> Result<usize, String> {
        match change {
            PoolChange::Dies { engine } => return self.dies(engine, now),
            PoolChange::Returns { engine } => {
                self.engines
                    .iter_mut()
                    .skip(engine)
                    .take(1)
                    .for_each(|engine| engine.forget());
                self.change_endpoint(engine, |endpoint| {
                    endpoint.readiness = Readiness::Ready;
                    endpoint.id.generation.0 += 1;
                });
            }
        }
        Ok(0)
    }

    /// Ends an engine. The engine's requests that have their first token fail. The proxies send all
    /// its other requests to other engines.
    fn dies(&mut self, engine: usize, now: f64) -> Result<usize, String> {
        let Some(SettingChange { failover, .. }) = self.setting.change else {
            return Ok(0);
        };
        self.engines
            .get_mut(engine)
            .ok_or("no such engine can die")?
            .fail();
        self.change_endpoint(engine, |endpoint| endpoint.readiness = Readiness::NotReady);
        let mut failed = 0;
        for request in 0..u32::try_from(self.in_flight.len()).unwrap_or(u32::MAX) {
            let flight = self
                .in_flight
                .get(request as usize)
                .and_then(Option::as_ref)
                .filter(|flight| flight.at == engine);
            let Some(SimulatedRequest {
                proxy, published, ..
            }) = flight
            else {
                continue;
            };
            if *published == 0 {
                self.events.plan(
                    now + failover.retry_ms,
                    WorldEvent::SendsAgain {
                        request,
                        proxy: *proxy,
                    },
                );
                self.remove_request(request, now);
            } else {
                failed += self.fails(request, now);
            }
        }
        Ok(failed)
    }

    /// Makes a request fail if it is in flight. Returns how many requests ended: 0 or 1.
    pub(super) fn fails(&mut self, request: u32, now: f64) -> usize {
        let Some(engine) = self.remove_request(request, now) else {
            return 0;
        };
        self.engines
            .iter_mut()
            .skip(engine)
            .take(1)
            .for_each(|engine| engine.abort(request));
        if let Some(record) = self.records.get_mut(request as usize) {
            record.ttft = FAILED_MS;
            record.e2e = FAILED_MS;
            record.has_failed = true;
        }
        self.plan_next_turn(request, now);
        1
    }

    /// Removes a request from the proxy that sent it. Returns the engine that had the request.
    fn remove_request(&mut self, request: u32, now: f64) -> Option<usize> {
        let SimulatedRequest {
            hold, proxy, at, ..
        } = self.in_flight.get_mut(request as usize)?.take()?;
        self.routers.get_mut(proxy)?.fail(hold, now);
        self.publish(proxy, now);
        Some(at)
    }

    /// Whether the engine accepts connections.
    pub(super) fn is_up(&self, engine: usize) -> bool {
        self.setting.change.is_none()
            || self
                .snapshot
                .endpoints()
                .get(engine)
                .is_some_and(|endpoint| endpoint.readiness == Readiness::Ready)
    }

    /// Changes an endpoint, and sends the proxies a pool update.
    fn change_endpoint(&mut self, at: usize, change: impl Fn(&mut Endpoint)) {
        let mut endpoints = self.snapshot.endpoints().to_vec();
        endpoints.iter_mut().skip(at).take(1).for_each(change);
        let metrics = self.snapshot.metrics().to_vec();
        if let Ok(snapshot) = self
            .snapshot
            .with_endpoints(Version::default(), endpoints, metrics)
        {
            self.snapshot = snapshot;
        }
        self.install();
    }
}
