//! Builds requests that the engine answers with an echo of what it received.

use http::Request;
use serde_json::{Value, json};
use testbed::Result;
use testbed::client::{self, Body, ClientReply};

/// Returns a chat request with one message.
pub(crate) fn chat(prompt: &str) -> Value {
    json!({"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": prompt}]})
}

/// Returns a request `POST path` with these headers, which the engine echoes.
pub(crate) fn post(
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<hyper::body::Bytes>,
) -> Result<Request<Body>> {
    request("POST", path, headers, client::full(body))
}

/// Returns a request `GET path` with these headers, which the engine echoes.
pub(crate) fn get(path: &str, headers: &[(&str, &str)]) -> Result<Request<Body>> {
    request("GET", path, headers, client::empty())
}

pub(crate) fn request(
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: Body,
) -> Result<Request<Body>> {
    let mut request = Request::builder()
        .method(method)
        .uri(path)
        .header("x-echo", "1");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    Ok(request.body(body)?)
}

/// Returns the values of a header that the engine received.
pub(crate) fn header<'a>(echo: &'a Value, name: &str) -> Vec<&'a str> {
    let pairs = echo["headers"].as_array().into_iter().flatten();
    pairs
        .filter(|pair| pair[0] == name)
        .filter_map(|pair| pair[1].as_str())
        .collect()
}

/// Returns the ranked list that the engine received, from an echo.
pub(crate) fn ranked(reply: &ClientReply) -> Result<Vec<String>> {
    let echo = reply.json()?;
    let list = header(&echo, "x-gateway-destination-endpoint");
    let [list] = list[..] else {
        return Err(format!(
            "not one destination: {list:?}, {} {}",
            reply.status,
            reply.text()
        )
        .into());
    };
    Ok(list.split(',').map(str::to_owned).collect())
}
