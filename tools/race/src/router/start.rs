//! Starts the processes of a router.

use std::net::SocketAddr;
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::Result;
use testbed::envoy::{EnvoyConfig, EnvoyOptions, EnvoyProcess};
use testbed::ports::ReservedPort;
use testbed::process::ChildProcess;
use testbed::second_envoy::SecondEnvoy;
use testbed::stack::Stack;

use super::{AddWorker, DynamoMode, EnvoyFault, RouterKind, RouterParts, RunningRouter};
use crate::mocker::MockerEngines;
use crate::serving::{THREADS, answers};

impl RouterKind {
    pub(super) async fn start_rival(
        &self,
        arguments: &[&str],
        urls: &[String],
        gateways: usize,
        adds_by: AddWorker,
        folder: TempDir,
    ) -> Result<RunningRouter> {
        let program = self
            .program()
            .ok_or("this router has no program of its own")?;
        let mut ports = Vec::new();
        let mut addresses = Vec::new();
        let mut processes = Vec::new();
        for gateway in 0..gateways {
            let [port, metrics] = [ReservedPort::lease()?, ReservedPort::lease()?];
            let own = folder.path().join(gateway.to_string());
            std::fs::create_dir(&own)?;
            let mut command = Command::new(&program);
            command.args(arguments).args([
                "--host",
                "127.0.0.1",
                "--port",
                &port.number().to_string(),
            ]);
            command
                .args([
                    "--prometheus-port",
                    &metrics.number().to_string(),
                    "--worker-urls",
                ])
                .args(urls);
            command.env("TOKIO_WORKER_THREADS", THREADS.to_string());
            processes.push(ChildProcess::spawn("rival", &mut command, &own)?);
            addresses.push(port.address());
            ports.extend([port, metrics]);
        }
        for (address, process) in addresses.iter().zip(&mut processes) {
            if let Err(error) = answers(*address).await {
                return Err(format!("{error}\n{}", process.log_tail(20)).into());
            }
        }
        Ok(RunningRouter {
            addresses,
            parts: RouterParts::Rival {
                processes,
                adds_by: Some(adds_by),
            },
            _ports: ports,
            _folder: folder,
        })
    }
}

pub(super) async fn start_ours(
    engines: &[SocketAddr],
    gateways: usize,
    config: Option<String>,
    folder: TempDir,
) -> Result<RunningRouter> {
    let arguments: Vec<&str> = config.iter().flat_map(|path| ["--config", path]).collect();
    let builder = Stack::builder()
        .servers(0)
        .concurrency(THREADS)
        .daemon_threads(THREADS)
        .daemon_arguments(&arguments)
        .quiet();
    let stack = engines
        .iter()
        .fold(builder, |builder, engine| builder.stranger(*engine))
        .start()
        .await?;
    let second = if gateways > 1 {
        Some(SecondEnvoy::start(&stack, "second", THREADS).await?)
    } else {
        None
    };
    let addresses = std::iter::once(stack.address())
        .chain(second.as_ref().map(|second| second.envoy.listener()))
        .collect();
    let parts = RouterParts::Ours {
        stack: Box::new(stack),
        _second: second.map(Box::new),
    };
    Ok(RunningRouter {
        addresses,
        parts,
        _ports: Vec::new(),
        _folder: folder,
    })
}

pub(super) async fn start_envoy(
    engines: &[SocketAddr],
    gateways: usize,
    fault: EnvoyFault,
    folder: TempDir,
) -> Result<RunningRouter> {
    let mut ports = Vec::new();
    let mut addresses = Vec::new();
    let mut processes = Vec::new();
    for gateway in 0..gateways {
        let port = ReservedPort::lease()?;
        let own = folder.path().join(gateway.to_string());
        std::fs::create_dir(&own)?;
        let mut config = EnvoyConfig::shipped("standalone.yaml")?;
        if let Some(filter) = fault.filter() {
            config.insert_before_picker(filter)?;
        }
        config.make_round_robin(&engines.iter().map(ToString::to_string).collect::<Vec<_>>())?;
        config.replace_port(8080, port.number())?;
        let options = EnvoyOptions {
            concurrency: THREADS,
            ..EnvoyOptions::default()
        };
        processes.push(EnvoyProcess::start(
            &config,
            port.address(),
            port.address(),
            &options,
            &own,
        )?);
        addresses.push(port.address());
        ports.push(port);
    }
    for address in &addresses {
        answers(*address).await?;
    }
    Ok(RunningRouter {
        addresses,
        parts: RouterParts::Envoy(processes),
        _ports: ports,
        _folder: folder,
    })
}

pub(super) async fn start_dynamo(
    engines: &MockerEngines,
    mode: DynamoMode,
    folder: TempDir,
) -> Result<RunningRouter> {
    let port = ReservedPort::lease()?;
    let mode = if mode == DynamoMode::Kv {
        "kv"
    } else {
        "round-robin"
    };
    let mut process = engines.start_router(mode, port.address(), folder.path())?;
    if let Err(error) = answers(port.address()).await {
        return Err(format!("{error}\n{}", process.log_tail(20)).into());
    }
    process.check_running()?;
    let parts = RouterParts::Rival {
        processes: vec![process],
        adds_by: None,
    };
    Ok(RunningRouter {
        addresses: vec![port.address()],
        parts,
        _ports: vec![port],
        _folder: folder,
    })
}

// === impl EnvoyFault ===

impl EnvoyFault {
    /// Returns Envoy's fault filter with this fault, or `None` if there is no fault.
    fn filter(self) -> Option<Value> {
        let share = |percent: u32| json!({"numerator": percent, "denominator": "HUNDRED"});
        let mut fault = match self {
            Self::None => return None,
            Self::Delay => json!({"delay": {"fixed_delay": "0.020s", "percentage": share(100)}}),
            Self::Drop => json!({"abort": {"http_status": 503, "percentage": share(2)}}),
        };
        fault["@type"] =
            json!("type.googleapis.com/envoy.extensions.filters.http.fault.v3.HTTPFault");
        Some(json!({"name": "fault", "typed_config": fault}))
    }
}
