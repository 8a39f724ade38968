//! Helpers that wait for events.

use std::fmt::Debug;
use std::future::Future;
use std::time::{Duration, Instant};

use discovery::{InstanceEvent, InstanceEvents};
use futures::StreamExt;

/// The maximum time that any step takes, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the next event as text: `+id@address`, with `?` if unconfirmed, or `-id`.
pub(crate) async fn next(events: &mut InstanceEvents) -> String {
    let event = tokio::time::timeout(PATIENCE, events.next())
        .await
        .expect("an event in time")
        .expect("the stream continues");
    match event {
        InstanceEvent::Added(instance) => {
            let mark = if instance.unconfirmed.is_some() {
                "?"
            } else {
                ""
            };
            format!("+{}@{}{mark}", instance.name, instance.address)
        }
        InstanceEvent::Removed(id) => format!("-{id}"),
    }
}

/// Checks that no event arrives for this long.
pub(crate) async fn silence(events: &mut InstanceEvents, elapsed: Duration) {
    if let Ok(event) = tokio::time::timeout(elapsed, events.next()).await {
        panic!("{event:?}, though nothing changed");
    }
}

/// Waits until `look` returns the expected value.
pub(crate) async fn until<T: PartialEq + Debug, F: Future<Output = T>>(
    expected: T,
    mut look: impl FnMut() -> F,
) {
    let began = Instant::now();
    loop {
        let seen = look().await;
        if seen == expected {
            return;
        }
        assert!(began.elapsed() < PATIENCE, "{seen:?}, not {expected:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
