//! Sends lines of the crate `log` to Envoy's log.

use std::io::Write as _;

use crate::abi;

#[derive(Debug)]
struct EnvoyLog;

impl log::Log for EnvoyLog {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        abi::is_logged(metadata.level())
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            abi::write_log(record.level(), &record.args().to_string());
        }
    }

    fn flush(&self) {}
}

/// Sends log lines and panics to Envoy's log. A panic is one line, because a backtrace takes a
/// tenth of a second.
pub(crate) fn install() {
    std::panic::set_hook(Box::new(|info| {
        abi::write_log(log::Level::Error, &format!("panic: {info}"));
    }));
    // It fails if Envoy loads the module a second time. Then the logger is already set.
    let _ = log::set_logger(&EnvoyLog);
    log::set_max_level(log::LevelFilter::Debug);
}

/// Says why the module is not loaded. Envoy's log is not reachable then.
pub(crate) fn refuse(why: &str) {
    let _ = writeln!(std::io::stderr(), "switchpoint: {why}");
}
