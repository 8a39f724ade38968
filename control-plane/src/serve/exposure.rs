//! The protection that each listener needs before other machines may reach it.
//!
//! | listener | beyond loopback it needs | lifted by |
//! |---|---|---|
//! | state and EDS | mutual TLS | `--insecure-state` |
//! | ext_proc | TLS (on unless `--ext-proc-plaintext` is given) | `--insecure-ext-proc` |
//! | admin and debug | mutual TLS, or a bearer token | `--insecure-admin` |
//! | metrics, scaler, health | nothing: they show counts and whether the daemon works | |

use std::net::SocketAddr;

use crate::cli::args::ServeArgs;
use crate::serve::listen::ListenerName;

struct ListenerExposure {
    listener: ListenerName,
    address: SocketAddr,
    /// Whether the listener authenticates clients, or encrypts its connections if encryption is
    /// enough.
    guarded: bool,
    /// Whether an `--insecure-...` flag switches the rule off.
    lifted: bool,
    /// The missing protection.
    lacks: &'static str,
    /// The risk without this protection.
    stake: &'static str,
    /// The option that the operator must set instead.
    remedy: &'static str,
}

/// Checks every listener. Returns a warning for each rule that the command line switches off.
///
/// # Errors
/// Fails if an option exposes a listener. The error names the option, the risk, and what to set.
pub fn check(args: &ServeArgs) -> Result<Vec<String>, String> {
    let mut warnings = Vec::new();
    for exposure in exposures(args) {
        let exposed = !exposure.guarded && !exposure.address.ip().to_canonical().is_loopback();
        match (exposed, exposure.lifted) {
            (false, _) => {}
            (true, true) => warnings.push(exposure.warning()),
            (true, false) => return Err(exposure.complaint()),
        }
    }
    if token_in_clear(args) {
        warnings.push("--admin-token-file without --admin-tls-cert: any machine on the network path can read the token".to_owned());
    }
    Ok(warnings)
}

fn exposures(args: &ServeArgs) -> Vec<ListenerExposure> {
    let state = ListenerExposure {
        listener: ListenerName::State,
        address: args.listen_state,
        guarded: args.state_tls.state_tls_client_ca.is_some(),
        lifted: args.state_tls.insecure_state,
        lacks: "without mutual TLS",
        stake: "any host that reaches it can read the secret key of the prompt hashes, and so test whether a given prompt was sent, can have \
                endpoints ejected on every proxy, and can exhaust the daemon's memory",
        remedy: "--state-tls-cert, --state-tls-key and --state-tls-client-ca",
    };
    let admin = ListenerExposure {
        listener: ListenerName::Admin,
        address: args.listen_admin,
        guarded: args.admin_tls.admin_tls_client_ca.is_some()
            || args.admin_tls.admin_token_file.is_some(),
        lifted: args.admin_tls.insecure_admin,
        lacks: "without mutual TLS or a token",
        stake: "any host that reaches it can read addresses and load of all endpoints, the configuration and the names of all proxies, and \
                make the daemon spend CPU on /debug/explain",
        remedy: "--admin-tls-cert, --admin-tls-key and --admin-tls-client-ca, or --admin-token-file; for Prometheus alone, --listen-metrics",
    };
    let ext_proc = args.ext_proc.listen_ext_proc.0.map(|address| ListenerExposure {
        listener: ListenerName::ExtProc,
        address,
        guarded: !args.ext_proc.ext_proc_plaintext,
        lifted: args.ext_proc.insecure_ext_proc,
        lacks: "in plaintext (--ext-proc-plaintext)",
        stake: "any machine on the network path can read and change the prompts that gateways send",
        remedy: "no --ext-proc-plaintext (a certificate is created at each start), or --ext-proc-tls-cert and --ext-proc-tls-key",
    });
    [Some(state), ext_proc, Some(admin)]
        .into_iter()
        .flatten()
        .collect()
}

fn token_in_clear(args: &ServeArgs) -> bool {
    let tls = &args.admin_tls;
    tls.admin_token_file.is_some()
        && tls.admin_tls_cert.is_none()
        && !args.listen_admin.ip().to_canonical().is_loopback()
}

// === impl ListenerExposure ===

impl ListenerExposure {
    fn what(&self) -> String {
        let Self {
            listener,
            address,
            lacks,
            stake,
            ..
        } = self;
        format!(
            "--listen-{} {address} is reachable from other machines {lacks}: {stake}",
            listener.name()
        )
    }

    fn complaint(&self) -> String {
        let what = self.what();
        let remedy = self.remedy;
        let name = self.listener.name();
        format!(
            "{what}. Give {remedy}; or listen on 127.0.0.1; or accept that with --insecure-{name}"
        )
    }

    fn warning(&self) -> String {
        format!("{} (--insecure-{})", self.what(), self.listener.name())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::args::{Cli, CliCommand};

    fn checked(arguments: &str) -> Result<Vec<String>, String> {
        let line = format!("switchpointd serve --endpoint 10.0.0.1:1 {arguments}");
        let CliCommand::Serve(serve) = Cli::try_parse_from(line.split_whitespace())
            .unwrap()
            .command
        else {
            panic!("not serve")
        };
        check(&serve)
    }

    fn refused(arguments: &str, parts: &[&str]) {
        let complaint = checked(arguments).expect_err(arguments);
        for part in parts {
            assert!(
                complaint.contains(part),
                "{arguments}: no {part:?} in {complaint}"
            );
        }
    }

    fn warned(arguments: &str, parts: &[&str]) {
        let warnings = checked(arguments).unwrap();
        assert_eq!(warnings.len(), parts.len(), "{arguments}: {warnings:?}");
        for (warning, part) in warnings.iter().zip(parts) {
            assert!(
                warning.contains(part),
                "{arguments}: no {part:?} in {warning}"
            );
        }
    }

    #[test]
    fn loopback_needs_nothing() {
        warned("", &[]);
        warned(
            "--listen-state [::1]:9004 --listen-admin 127.3.2.1:9090 --listen-ext-proc [::ffff:127.0.0.1]:9002 --ext-proc-plaintext",
            &[],
        );
    }

    #[test]
    fn state_needs_mutual_tls() {
        let all = [
            "--listen-state 0.0.0.0:9004",
            "given prompt",
            "--state-tls-client-ca",
            "--insecure-state",
        ];
        refused("--listen-state 0.0.0.0:9004", &all);
        refused("--listen-state [::]:9004", &["--listen-state [::]:9004"]);
        refused(
            "--listen-state 10.0.0.1:9004 --state-tls-cert c --state-tls-key k",
            &["without mutual TLS"],
        );
        warned(
            "--listen-state 0.0.0.0:9004 --state-tls-cert c --state-tls-key k --state-tls-client-ca a",
            &[],
        );
        warned(
            "--listen-state 0.0.0.0:9004 --insecure-state",
            &["--insecure-state"],
        );
    }

    #[test]
    fn ext_proc_needs_tls() {
        warned("--listen-ext-proc 0.0.0.0:9002", &[]);
        warned("--listen-ext-proc none --ext-proc-plaintext", &[]);
        refused(
            "--listen-ext-proc 0.0.0.0:9002 --ext-proc-plaintext",
            &["--ext-proc-plaintext", "prompts", "--insecure-ext-proc"],
        );
        warned(
            "--listen-ext-proc 0.0.0.0:9002 --ext-proc-plaintext --insecure-ext-proc",
            &["--insecure-ext-proc"],
        );
    }

    #[test]
    fn admin_needs_mutual_tls_or_a_token() {
        refused(
            "--listen-admin 0.0.0.0:9090",
            &[
                "--listen-admin",
                "--admin-token-file",
                "--listen-metrics",
                "--insecure-admin",
            ],
        );
        refused(
            "--listen-admin 0.0.0.0:9090 --admin-tls-cert c --admin-tls-key k",
            &["without mutual TLS or a token"],
        );
        warned(
            "--listen-admin 0.0.0.0:9090 --admin-tls-cert c --admin-tls-key k --admin-tls-client-ca a",
            &[],
        );
        warned(
            "--listen-admin 0.0.0.0:9090 --admin-tls-cert c --admin-tls-key k --admin-token-file t",
            &[],
        );
        warned(
            "--listen-admin 0.0.0.0:9090 --admin-token-file t",
            &["read the token"],
        );
        warned(
            "--listen-admin 0.0.0.0:9090 --insecure-admin",
            &["--insecure-admin"],
        );
    }

    #[test]
    fn metrics_scaler_and_health_are_open() {
        warned(
            "--listen-metrics 0.0.0.0:9091 --listen-scaler 0.0.0.0:9005 --listen-health 0.0.0.0:9003",
            &[],
        );
    }
}
