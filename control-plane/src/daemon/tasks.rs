//! A group of tasks that start and stop together.

use std::time::Duration;

use tokio::task::{AbortHandle, JoinSet};

use crate::shutdown::{self, Shutdown, ShutdownTrigger};

/// The maximum time that tasks may take to stop. Streams end immediately; only a scrape or a disk
/// write takes time.
const SHUTDOWN_DEADLINE: Duration = Duration::from_secs(5);

/// Tasks with one shutdown signal. No task should end before the signal.
#[derive(Debug)]
pub struct TaskGroup {
    pub tasks: JoinSet<&'static str>,
    pub shutdown: Shutdown,
    trigger: ShutdownTrigger,
}

// === impl TaskGroup ===

impl TaskGroup {
    #[must_use]
    pub fn new() -> Self {
        let (trigger, shutdown) = shutdown::channel();
        Self {
            tasks: JoinSet::new(),
            shutdown,
            trigger,
        }
    }

    pub fn spawn(
        &mut self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> AbortHandle {
        self.tasks.spawn(async move {
            task.await;
            name
        })
    }

    /// Waits until a task ends and returns its name. The call is cancel-safe.
    pub async fn task_ended(&mut self) -> &'static str {
        match self.tasks.join_next().await {
            Some(Ok(name)) => name,
            Some(Err(_)) => "a task (it panicked)",
            None => "all tasks",
        }
    }

    /// Stops all tasks. Abandons tasks that take longer than [`SHUTDOWN_DEADLINE`].
    pub async fn stop(mut self) {
        self.trigger.pull();
        let all = async { while self.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(SHUTDOWN_DEADLINE, all).await.is_err() {
            tracing::warn!(after = ?SHUTDOWN_DEADLINE, "some tasks did not stop in time; the daemon exits anyway");
        }
    }
}

impl Default for TaskGroup {
    fn default() -> Self {
        Self::new()
    }
}
