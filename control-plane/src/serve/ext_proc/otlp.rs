//! Sends spans to an OpenTelemetry collector, as OTLP over HTTP in JSON
//! (opentelemetry-proto, `docs/specification.md`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use ext_proc::{RequestSpan, SpanCounts};
use reqwest::redirect::Policy;
use reqwest::{Client, Response, Url};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::scrape::http_client;
use crate::shutdown::Shutdown;

/// The maximum number of spans of one call; each span has one or two KB, mostly the candidates.
const BATCH_MAX: usize = 256;

/// The maximum time that a span waits for other spans.
const BATCH_WAIT: Duration = Duration::from_secs(1);

/// The maximum time that the collector may take to answer: less than tasks may take to stop.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// The path of traces below the endpoint.
const PATH: &str = "v1/traces";

/// The value of `SPAN_KIND_SERVER` in OTLP.
const KIND_SERVER: u8 = 2;

/// The state of the export to the collector.
struct SpanExporter {
    client: Client,
    url: Url,
    counts: Arc<SpanCounts>,
    /// Whether the collector accepted the last batch.
    works: bool,
}

/// Sends spans until `shutdown`, then the spans that still wait. Spans that the collector refuses
/// are counted and dropped, because traces must not use the memory of requests.
pub async fn export(
    endpoint: Url,
    mut spans: mpsc::Receiver<RequestSpan>,
    counts: Arc<SpanCounts>,
    mut shutdown: Shutdown,
) {
    let client = || {
        Client::builder()
            .no_proxy()
            .redirect(Policy::none())
            .timeout(ANSWER_MAX)
    };
    let client = match http_client::build(client) {
        Ok(client) => client,
        Err(error) => {
            tracing::warn!(%error, "cannot send spans");
            return shutdown.begun().await;
        }
    };
    let mut exporter = SpanExporter {
        client,
        url: target(endpoint),
        counts,
        works: true,
    };
    let mut batch = Vec::new();
    let mut stops = false;
    while !stops {
        tokio::select! {
            _ = spans.recv_many(&mut batch, BATCH_MAX) => {}
            () = shutdown.begun() => stops = true,
        }
        // A full batch does not wait for more spans. After the shutdown signal, the streams that it
        // ends have this time to write their spans.
        if batch.len() < BATCH_MAX {
            tokio::select! {
                () = tokio::time::sleep(BATCH_WAIT) => {}
                () = shutdown.begun(), if !stops => {}
            }
        }
        exporter.send_waiting(&mut spans, &mut batch).await;
        while stops && exporter.works && !spans.is_empty() {
            exporter.send_waiting(&mut spans, &mut batch).await;
        }
    }
}

// === impl SpanExporter ===

impl SpanExporter {
    /// Moves waiting spans into the batch, sends the batch and empties it.
    async fn send_waiting(
        &mut self,
        spans: &mut mpsc::Receiver<RequestSpan>,
        batch: &mut Vec<RequestSpan>,
    ) {
        while batch.len() < BATCH_MAX
            && let Ok(span) = spans.try_recv()
        {
            batch.push(span);
        }
        if batch.is_empty() {
            return;
        }
        let sent = self
            .client
            .post(self.url.clone())
            .json(&message(batch))
            .send()
            .await
            .and_then(Response::error_for_status);
        let works = sent
            .as_ref()
            .is_ok_and(|answer| answer.status().is_success());
        if works != self.works {
            self.works = works;
            match &sent {
                Ok(_) if works => {
                    tracing::info!(url = %self.url, "the collector accepts spans again");
                }
                Ok(answer) => {
                    tracing::warn!(url = %self.url, status = %answer.status(), "the collector does not accept spans");
                }
                Err(error) => {
                    tracing::warn!(url = %self.url, %error, "the collector does not accept spans");
                }
            }
        }
        let count: &AtomicU64 = if works {
            &self.counts.sent
        } else {
            &self.counts.failed
        };
        count.fetch_add(batch.len() as u64, Ordering::Relaxed);
        batch.clear();
    }
}

/// Returns the URL for traces. The endpoint is the base of the URLs of all signals.
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
    let nanos = |time: SystemTime| {
        time.duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default()
            .as_nanos()
            .to_string()
    };
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

/// Returns an attribute, as an integer if the value is a whole number.
fn attribute(name: &str, value: &str) -> Value {
    let kind = if value.parse::<i64>().is_ok() {
        "intValue"
    } else {
        "stringValue"
    };
    json!({"key": name, "value": {kind: value}})
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpListener;
    use std::thread::JoinHandle;

    use exchange::trace::TraceContext;
    use ext_proc::SpanQueue;

    use super::*;
    use crate::shutdown;

    const CONTEXT: TraceContext = TraceContext {
        trace_id: 0xab,
        parent: 0xcd,
        sampled: true,
    };

    /// Starts a collector that answers each call with the next of these statuses. The task returns
    /// the number of spans in each call.
    fn collector(statuses: &'static [u16]) -> (Url, JoinHandle<Vec<usize>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap())
            .parse()
            .unwrap();
        let answer = move |status: &u16| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let lines = reader
                .by_ref()
                .lines()
                .map_while(Result::ok)
                .take_while(|line| !line.is_empty());
            let length = lines
                .filter_map(|line| line.strip_prefix("content-length: ")?.parse().ok())
                .last();
            let mut body = vec![0; length.unwrap()];
            reader.read_exact(&mut body).unwrap();
            write!(stream, "HTTP/1.1 {status} x\r\nlocation: /elsewhere\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").unwrap();
            let message: Value = serde_json::from_slice(&body).unwrap();
            message["resourceSpans"][0]["scopeSpans"][0]["spans"]
                .as_array()
                .unwrap()
                .len()
        };
        (
            url,
            std::thread::spawn(move || statuses.iter().map(answer).collect()),
        )
    }

    /// Runs an exporter with this many spans until the collector has answered as often as it can.
    /// Returns the number of spans in each call, and how many were sent and failed.
    async fn exported(
        waiting: usize,
        statuses: &'static [u16],
        stops_first: bool,
    ) -> (Vec<usize>, u64, u64) {
        let (url, collector) = collector(statuses);
        let (queue, spans) = SpanQueue::new();
        (0..waiting).for_each(|_| queue.end(RequestSpan::begin(CONTEXT)));
        let (trigger, shutdown) = shutdown::channel();
        if stops_first {
            trigger.pull();
        }
        let exporter = tokio::spawn(export(url, spans, Arc::clone(queue.counts()), shutdown));
        let calls = tokio::task::spawn_blocking(|| collector.join().unwrap())
            .await
            .unwrap();
        trigger.pull();
        exporter.await.unwrap();
        let counts = queue.counts();
        (
            calls,
            counts.sent.load(Ordering::Relaxed),
            counts.failed.load(Ordering::Relaxed),
        )
    }

    #[tokio::test]
    async fn spans_go_in_batches_and_refused_ones_are_counted() {
        assert_eq!(
            exported(600, &[200, 307, 503], false).await,
            (vec![256, 256, 88], 256, 344)
        );
    }

    #[tokio::test]
    async fn what_waits_at_the_stop_is_sent() {
        assert_eq!(
            exported(300, &[200, 200], true).await,
            (vec![256, 44], 300, 0)
        );
    }

    #[test]
    fn a_span_is_json_of_otlp() {
        let began = SystemTime::UNIX_EPOCH + Duration::from_nanos(5);
        let ended = SystemTime::UNIX_EPOCH + Duration::from_secs(1);
        let attributes = vec![
            ("switchpoint.ttft_ms".to_owned(), "12".to_owned()),
            ("a".to_owned(), "x".to_owned()),
        ];
        let made = span(&RequestSpan {
            context: CONTEXT,
            id: 0xef,
            began,
            ended,
            attributes,
        });
        assert_eq!(made["traceId"], "000000000000000000000000000000ab");
        assert_eq!(
            (&made["spanId"], &made["parentSpanId"]),
            (&json!("00000000000000ef"), &json!("00000000000000cd"))
        );
        assert_eq!(
            (&made["startTimeUnixNano"], &made["endTimeUnixNano"]),
            (&json!("5"), &json!("1000000000"))
        );
        assert_eq!(
            made["attributes"],
            json!([{"key": "switchpoint.ttft_ms", "value": {"intValue": "12"}}, {"key": "a", "value": {"stringValue": "x"}}])
        );
    }

    #[test]
    fn an_endpoint_is_the_base_of_the_path() {
        let of = |endpoint: &str| target(endpoint.parse().unwrap()).to_string();
        assert_eq!(
            of("http://127.0.0.1:4318"),
            "http://127.0.0.1:4318/v1/traces"
        );
        assert_eq!(
            of("https://collector/otlp/"),
            "https://collector/otlp/v1/traces"
        );
    }
}
