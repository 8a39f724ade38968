//! Parsers for the values of options.

use std::time::Duration;

use reqwest::Url;

use super::OptionalAddress;

/// Reads `ip:port` or `none`.
pub(super) fn listen(text: &str) -> Result<OptionalAddress, String> {
    let address = || {
        text.parse()
            .map(Some)
            .map_err(|_| "give an address as 127.0.0.1:9002, or `none`".to_owned())
    };
    if text == "none" {
        Ok(OptionalAddress(None))
    } else {
        address().map(OptionalAddress)
    }
}

/// Reads a header name that HTTP/2 allows.
pub(super) fn header_name(text: &str) -> Result<String, String> {
    let allowed = (1..=128).contains(&text.len())
        && text
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    if allowed {
        Ok(text.to_owned())
    } else {
        Err("must be 1 to 128 characters a-z, 0-9 and -".to_owned())
    }
}

/// Reads the address of a collector. The address must not have credentials, because log lines
/// contain it.
pub(super) fn collector(text: &str) -> Result<Url, String> {
    let url = Url::parse(text).map_err(|error| error.to_string())?;
    let is_plain = url.username().is_empty()
        && url.password().is_none()
        && url.query().is_none()
        && url.fragment().is_none();
    let is_http = matches!(url.scheme(), "http" | "https") && url.has_host();
    if is_http && is_plain {
        Ok(url)
    } else {
        Err("give an address as http://127.0.0.1:4318, without credentials or query".to_owned())
    }
}

/// Reads a duration greater than zero: `250ms`, `2s`, `1.5s`, `1m`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let split = text
        .find(|c: char| c.is_ascii_alphabetic())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let scale = match unit {
        "ms" => 0.001,
        "s" => 1.0,
        "m" => 60.0,
        _ => return Err("give a number and a unit: 250ms, 2s or 1m".to_owned()),
    };
    let seconds: f64 = number
        .parse()
        .map_err(|_| format!("{number:?} is not a number"))?;
    Duration::try_from_secs_f64(seconds * scale)
        .ok()
        .filter(|d| !d.is_zero())
        .ok_or_else(|| "must be greater than zero".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_of_a_collector_has_no_credentials() {
        let read = |text| collector(text).map(String::from);
        assert_eq!(
            read("http://127.0.0.1:4318"),
            Ok("http://127.0.0.1:4318/".into())
        );
        assert_eq!(
            read("https://collector/otlp"),
            Ok("https://collector/otlp".into())
        );
        for invalid in [
            "https://user:secret@c",
            "http://user@c",
            "http://c/?key=1",
            "http://c/#a",
            "ftp://c",
            "c:4318",
            "file:///x",
            "",
        ] {
            assert!(read(invalid).is_err(), "{invalid}");
        }
    }
}
