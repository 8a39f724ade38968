//! Decides golden cases. Either one from standard input, printed with every digit, so that two
//! builds can be compared byte for byte. Or, with `--accept FILE...`, it rewrites each file's
//! expectation to the present decision; read the diff before you commit it.

#[path = "../tests/it/case.rs"]
mod case;

use std::io::{Read, Write};
use std::process::ExitCode;

use case::{DecisionCase, Digits};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.split_first() {
        None => print(),
        Some((flag, files)) if flag == "--accept" => files.iter().try_for_each(|file| accept(file)),
        Some(_) => Err("usage: golden < CASE | golden --accept FILE...".to_owned()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "golden: {error}");
            ExitCode::FAILURE
        }
    }
}

fn print() -> Result<(), String> {
    let mut text = String::new();
    std::io::stdin()
        .read_to_string(&mut text)
        .map_err(|e| e.to_string())?;
    let outcome = DecisionCase::parse(&text)?.decide()?;
    std::io::stdout()
        .write_all(outcome.render(Digits::All).as_bytes())
        .map_err(|e| e.to_string())
}

fn accept(file: &str) -> Result<(), String> {
    let text = std::fs::read_to_string(file).map_err(|e| format!("{file}: {e}"))?;
    let case = DecisionCase::parse(&text).map_err(|e| format!("{file}: {e}"))?;
    let decided = case
        .decide()
        .map_err(|e| format!("{file}: {e}"))?
        .render(Digits::Few);
    if case.expected.trim() == decided.trim() {
        return Ok(());
    }
    let given = text
        .split_once("\nexpect\n")
        .map_or(text.as_str(), |(given, _)| given);
    let text = format!("{}\n\nexpect\n{decided}", given.trim_end());
    std::fs::write(file, text).map_err(|e| format!("{file}: {e}"))
}
