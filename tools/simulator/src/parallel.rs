//! Runs jobs on several threads.

use std::sync::Mutex;

/// Runs all jobs on this many threads. Returns the results in the order of the jobs.
pub(crate) fn parallel<J: Sync, T: Send>(
    threads: usize,
    jobs: &[J],
    work: impl Fn(&J) -> Result<T, String> + Sync,
) -> Result<Vec<T>, String> {
    let next = Mutex::new(0..jobs.len());
    let done = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                loop {
                    let Some(at) = next.lock().ok().and_then(|mut next| next.next()) else {
                        return;
                    };
                    let Some(job) = jobs.get(at) else { return };
                    let result = work(job);
                    if let Ok(mut done) = done.lock() {
                        done.push((at, result));
                    }
                }
            });
        }
    });
    let mut done = done.into_inner().map_err(|_| "a run panicked".to_owned())?;
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}
