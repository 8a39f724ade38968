//! The examples run and work together.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// The maximum time of a step, which is longer than every step takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running example, which ends with its test.
struct ExampleProcess(Child);

impl Drop for ExampleProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the path of the example that `cargo test` built, or `None` if `cargo test` built only
/// this test.
fn binary(name: &str) -> Option<PathBuf> {
    let us = std::env::current_exe().unwrap();
    let path = us.ancestors().nth(2).unwrap().join("examples").join(name);
    if !path.exists() {
        // Writes the line that `cluster::skipped` would write. The function exists only with a
        // backend that needs a server.
        let thread = std::thread::current();
        let why = "the examples are not built; `cargo build -p discovery --examples` builds them";
        let _ = writeln!(
            std::io::stdout(),
            "SKIPPED {}: {why}",
            thread.name().unwrap_or("a_test")
        );
        return None;
    }
    Some(path)
}

#[test]
fn a_frontend_sees_a_worker_come_and_go() {
    let (Some(worker), Some(frontend)) = (binary("worker"), binary("frontend")) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let mut frontend = Command::new(frontend)
        .arg(folder.path())
        .stdout(Stdio::piped())
        .spawn()
        .map(ExampleProcess)
        .unwrap();
    let (say, said) = mpsc::channel();
    let lines = BufReader::new(frontend.0.stdout.take().unwrap()).lines();
    std::thread::spawn(move || {
        lines
            .map_while(Result::ok)
            .try_for_each(|line| say.send(line))
    });
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let worker = Command::new(worker)
        .arg(folder.path())
        .arg(port.to_string())
        .spawn()
        .map(ExampleProcess)
        .unwrap();
    let there = said.recv_timeout(PATIENCE).unwrap();
    assert!(
        there.contains(&port.to_string()) && there.contains("Qwen3-32B"),
        "{there}"
    );
    drop(worker);
    // The killed worker leaves its file, which keeps the instance until heartbeats are missed. The
    // module `directory` tests how long the instance stays.
    std::fs::remove_dir_all(folder.path().join("dynamo")).unwrap();
    assert_eq!(said.recv_timeout(PATIENCE).unwrap(), "{}");
}
