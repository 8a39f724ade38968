//! Sends spans to an OpenTelemetry collector, as OTLP over HTTP in JSON
//! (opentelemetry-proto, `docs/specification.md`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use reqwest::{Client, Url};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::span::{RequestSpan, SpanCounts};
use crate::scrape::http_client;
use crate::shutdown::Shutdown;

/// The most spans of one call; each has some KB, mostly the candidates.
const BATCH_MAX: usize = 256;

/// How long a span waits for others.
const BATCH_WAIT: Duration = Duration::from_secs(1);

/// How long the collector may take to answer; the daemon may stop no sooner.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// The path of traces below the endpoint.
const PATH: &str = "v1/traces";

/// `SPAN_KIND_SERVER`.
const KIND_SERVER: u8 = 2;

/// Sends spans until `shutdown`. What the collector does not take is counted and dropped: traces
/// must not take the memory of requests.
pub async fn export(endpoint: Url, mut spans: mpsc::Receiver<RequestSpan>, counts: Arc<SpanCounts>, mut shutdown: Shutdown) {
    let Ok(client) = http_client::build(|| Client::builder().no_proxy().timeout(ANSWER_MAX)) else { return };
    let url = target(endpoint);
    let (mut batch, mut works) = (Vec::new(), true);
    loop {
        let received = tokio::select! {
            received = spans.recv_many(&mut batch, BATCH_MAX) => received,
            () = shutdown.begun() => return,
        };
        if received == 0 {
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(BATCH_WAIT) => {}
            () = shutdown.begun() => {}
        }
        while batch.len() < BATCH_MAX
            && let Ok(span) = spans.try_recv()
        {
            batch.push(span);
        }
        let sent = client.post(url.clone()).json(&message(&batch)).send().await.and_then(reqwest::Response::error_for_status);
        if sent.is_ok() != works {
            works = sent.is_ok();
            match &sent {
                Ok(_) => tracing::info!(%url, "the collector takes spans again"),
                Err(error) => tracing::warn!(%url, %error, "the collector takes no spans"),
            }
        }
        let count: &AtomicU64 = if works { &counts.sent } else { &counts.failed };
        count.fetch_add(batch.len() as u64, Ordering::Relaxed);
        batch.clear();
    }
}

/// The URL for traces: an endpoint is the base of the URLs of all signals.
fn target(mut endpoint: Url) -> Url {
    let path = format!("{}/{PATH}", endpoint.path().trim_end_matches('/'));
    endpoint.set_path(&path);
    endpoint
}

fn message(spans: &[RequestSpan]) -> Value {
    json!({"resourceSpans": [{
        "resource": {"attributes": [attribute("service.name", "switchpointd"), attribute("service.version", env!("CARGO_PKG_VERSION"))]},
        "scopeSpans": [{"scope": {"name": "switchpoint.ext_proc"}, "spans": spans.iter().map(span).collect::<Vec<_>>()}],
    }]})
}

fn span(span: &RequestSpan) -> Value {
    let nanos = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos().to_string();
    json!({
        "traceId": format!("{:032x}", span.context.trace_id),
        "spanId": format!("{:016x}", span.id),
        "parentSpanId": format!("{:016x}", span.context.parent),
        "name": "switchpoint.pick",
        "kind": KIND_SERVER,
        "startTimeUnixNano": nanos(span.began),
        "endTimeUnixNano": nanos(span.ended),
        "attributes": span.attributes.iter().map(|(name, value)| attribute(name, value)).collect::<Vec<_>>(),
    })
}

/// An attribute; a whole number where the value is one.
fn attribute(name: &str, value: &str) -> Value {
    let kind = if value.parse::<i64>().is_ok() { "intValue" } else { "stringValue" };
    json!({"key": name, "value": {kind: value}})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::ext_proc::span::TraceContext;

    #[test]
    fn a_span_is_json_of_otlp() {
        let context = TraceContext { trace_id: 0xab, parent: 0xcd, sampled: true };
        let (began, ended) = (SystemTime::UNIX_EPOCH + Duration::from_nanos(5), SystemTime::UNIX_EPOCH + Duration::from_secs(1));
        let attributes = vec![("switchpoint.ttft_ms".to_owned(), "12".to_owned()), ("a".to_owned(), "x".to_owned())];
        let made =
            &message(&[RequestSpan { context, id: 0xef, began, ended, attributes }])["resourceSpans"][0]["scopeSpans"][0]["spans"][0];
        assert_eq!(made["traceId"], "000000000000000000000000000000ab");
        assert_eq!((&made["spanId"], &made["parentSpanId"]), (&json!("00000000000000ef"), &json!("00000000000000cd")));
        assert_eq!((&made["startTimeUnixNano"], &made["endTimeUnixNano"]), (&json!("5"), &json!("1000000000")));
        assert_eq!(
            made["attributes"],
            json!([{"key": "switchpoint.ttft_ms", "value": {"intValue": "12"}}, {"key": "a", "value": {"stringValue": "x"}}])
        );
    }

    #[test]
    fn an_endpoint_is_the_base_of_the_path() {
        let of = |endpoint: &str| target(endpoint.parse().unwrap()).to_string();
        assert_eq!(of("http://127.0.0.1:4318"), "http://127.0.0.1:4318/v1/traces");
        assert_eq!(of("https://collector/otlp/"), "https://collector/otlp/v1/traces");
    }
}
