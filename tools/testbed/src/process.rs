//! A child process that is killed when its owner is dropped. Files keep the output of the process,
//! to explain failures.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::Result;

/// Time between two checks whether a process has ended.
const POLL: Duration = Duration::from_millis(10);

/// A running process. Dropping this value kills the process.
#[derive(Debug)]
pub struct ChildProcess {
    name: &'static str,
    child: Child,
    stdout: PathBuf,
    stderr: PathBuf,
}

// === impl ChildProcess ===

impl ChildProcess {
    /// Starts `command`. The output of the process goes to `<name>.out` and `<name>.err` in
    /// `folder`.
    ///
    /// # Errors
    /// Fails if the program cannot be run. The error names the program.
    pub fn spawn(name: &'static str, command: &mut Command, folder: &Path) -> Result<Self> {
        Self::spawn_with_stdin(name, command.stdin(Stdio::null()), folder)
    }

    /// Like [`Self::spawn`], but keeps the standard input that `command` sets.
    pub(crate) fn spawn_with_stdin(
        name: &'static str,
        command: &mut Command,
        folder: &Path,
    ) -> Result<Self> {
        let stdout = folder.join(format!("{name}.out"));
        let stderr = folder.join(format!("{name}.err"));
        // A restarted process appends to the same files, so that the output of the previous one
        // stays readable.
        let append = |path: &Path| File::options().create(true).append(true).open(path);
        let child = command
            .stdout(append(&stdout)?)
            .stderr(append(&stderr)?)
            .spawn()
            .map_err(|error| {
                format!("{} cannot be run: {error}", command.get_program().display())
            })?;
        Ok(Self {
            name,
            child,
            stdout,
            stderr,
        })
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the resident memory of the process, in bytes.
    ///
    /// # Errors
    /// Fails if the process has ended.
    pub fn memory_bytes(&self) -> Result<u64> {
        memory_bytes(self.id())
    }

    /// Checks that the process runs.
    ///
    /// # Errors
    /// Fails if the process has ended. The error has the exit status and the end of the log.
    pub fn check_running(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => {
                Err(format!("{} ended: {status}\n{}", self.name, self.log_tail(40)).into())
            }
        }
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// Fails if the process has ended.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        self.check_running()?; // after a wait for the end of a process, its id may belong to another process
        let id = Pid::from_raw(i32::try_from(self.child.id())?).ok_or("a process id is not 0")?;
        Ok(kill_process(id, signal)?)
    }

    /// Sends SIGTERM and waits until the process ends. Kills the process after `limit`.
    ///
    /// # Errors
    /// Fails if the process had to be killed, or waiting for it fails.
    pub async fn stop(&mut self, limit: Duration) -> Result<ExitStatus> {
        let _ = self.signal(Signal::TERM); // the process may have ended already
        self.wait(limit).await
    }

    /// Waits until the process ends by itself. Kills the process after `limit`.
    ///
    /// # Errors
    /// Fails if the process had to be killed, or waiting for it fails.
    pub async fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let end = Instant::now() + limit;
        while Instant::now() < end {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            tokio::time::sleep(POLL).await;
        }
        self.kill()?;
        Err(format!("{} did not end within {limit:?}", self.name).into())
    }

    /// Kills the process immediately, like a crash.
    ///
    /// # Errors
    /// Fails if the wait for the end of the process fails.
    pub fn kill(&mut self) -> Result<ExitStatus> {
        self.child.kill()?;
        Ok(self.child.wait()?)
    }

    pub fn stdout(&self) -> String {
        std::fs::read_to_string(&self.stdout).unwrap_or_default()
    }

    pub fn stderr(&self) -> String {
        std::fs::read_to_string(&self.stderr).unwrap_or_default()
    }

    /// Returns the last `lines` lines of standard output and standard error, for display.
    pub fn log_tail(&self, lines: usize) -> String {
        let tail = |stream: &str, text: &str| {
            let skip = text.lines().count().saturating_sub(lines);
            text.lines()
                .skip(skip)
                .map(|line| format!("  {} {stream} | {line}\n", self.name))
                .collect::<String>()
        };
        tail("out", &self.stdout()) + &tail("err", &self.stderr())
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.kill(); // the process may have ended already
    }
}

/// Returns the resident memory of a process, in bytes.
///
/// # Errors
/// Fails if no process has this id.
pub fn memory_bytes(pid: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .ok_or("no VmRSS")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse::<u64>()? * 1024)
}
