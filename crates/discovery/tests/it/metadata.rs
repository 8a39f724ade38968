//! Tests metadata over HTTP. A registered process serves metadata, and a hostile process tries to
//! harm discovery with its metadata.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use discovery::backend::{
    Backend, BackendEvent, Component, InstanceReadiness, InstanceRecord, MetadataSource,
};
use discovery::directory::DirectoryRegistry;
use discovery::metadata::METADATA_BYTES_MAX;
use discovery::{
    Discovery, Instance, InstanceState, InstanceStatus, LocalAddresses, MetadataPolicy,
    ServiceDiscovery, ServiceRegistry, serve,
};
use futures::stream::{BoxStream, StreamExt};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc};
use tokio_stream::wrappers::UnboundedReceiverStream;

use crate::events::{next, until};

/// A backend whose events the test sends.
struct ScriptedBackend(std::sync::Mutex<Option<mpsc::UnboundedReceiver<BackendEvent>>>);

impl Backend for ScriptedBackend {
    fn follow(&self, _: &Component, _: Arc<Notify>) -> BoxStream<'static, BackendEvent> {
        UnboundedReceiverStream::new(self.0.lock().unwrap().take().unwrap()).boxed()
    }
}

fn played() -> (
    Discovery<ScriptedBackend>,
    mpsc::UnboundedSender<BackendEvent>,
) {
    let (play, events) = mpsc::unbounded_channel();
    (
        Discovery::new(
            ScriptedBackend(std::sync::Mutex::new(Some(events))),
            MetadataPolicy::Preferred,
        )
        .with_local_addresses(LocalAddresses::Allowed),
        play,
    )
}

fn record(name: &str, address: SocketAddr) -> Arc<InstanceRecord> {
    let instance = Instance::new(name, address);
    Arc::new(InstanceRecord {
        instance,
        readiness: InstanceReadiness::Ready,
        metadata: MetadataSource::At(address),
        freshness: 0,
    })
}

async fn listen(router: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

async fn ask(address: SocketAddr, path: &str, etag: Option<&str>) -> (u16, Option<String>, String) {
    use hyper_util::client::legacy::Client;
    let client = Client::builder(hyper_util::rt::TokioExecutor::new()).build_http::<Body>();
    let mut request = axum::http::Request::get(format!("http://{address}{path}"));
    if let Some(etag) = etag {
        request = request.header(header::IF_NONE_MATCH, etag);
    }
    let response = client
        .request(request.body(Body::empty()).unwrap())
        .await
        .unwrap();
    let etag = response
        .headers()
        .get(header::ETAG)
        .map(|v| v.to_str().unwrap().to_owned());
    let status = response.status().as_u16();
    let body = axum::body::to_bytes(Body::new(response.into_body()), usize::MAX)
        .await
        .unwrap();
    (status, etag, String::from_utf8(body.to_vec()).unwrap())
}

#[tokio::test]
async fn what_a_process_serves_of_itself() {
    let root = tempfile::tempdir().unwrap();
    let registry = DirectoryRegistry::new(root.path(), SocketAddr::from(([10, 0, 0, 1], 1)));
    let worker = registry
        .register_instance("dynamo", "decode")
        .await
        .unwrap();
    let address = listen(serve::router(&worker)).await;
    assert_eq!(ask(address, "/health", None).await.0, 503);
    worker
        .set_metadata(json!({"model": "m"}).as_object().cloned().unwrap())
        .unwrap();
    let (status, etag, body) = ask(address, "/metadata", None).await;
    assert_eq!(
        (status, body.as_str()),
        (200, r#"{"model":"m"}"#),
        "readable at once, before it is ready"
    );
    assert_eq!(ask(address, "/metadata", etag.as_deref()).await.0, 304);
    worker.set_ready(InstanceStatus::Ready);
    assert_eq!(
        ask(address, "/health", None).await,
        (200, None, r#"{"status":"ready"}"#.to_owned())
    );
    worker
        .set_metadata(json!({"model": "n"}).as_object().cloned().unwrap())
        .unwrap();
    let (status, newer, body) = ask(address, "/metadata", etag.as_deref()).await;
    assert_eq!((status, body.as_str()), (200, r#"{"model":"n"}"#));
    assert_ne!(etag, newer);
    drop(worker);
    let (status, _, body) = ask(address, "/health", None).await;
    assert_eq!(
        (status, body.as_str()),
        (503, r#"{"status":"notready"}"#),
        "a dropped handle fails the probe"
    );
}

#[tokio::test]
async fn it_is_fetched_when_an_instance_appears_and_again_when_its_record_changes() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let address = listen(Router::new().route(
        "/metadata",
        get(move |headers: HeaderMap| async move {
            count.fetch_add(1, Ordering::Relaxed);
            let known = headers
                .get(header::IF_NONE_MATCH)
                .is_some_and(|v| v == "\"7\"");
            if known {
                StatusCode::NOT_MODIFIED.into_response()
            } else {
                ([(header::ETAG, "\"7\"")], r#"{"model":"m"}"#).into_response()
            }
        }),
    ))
    .await;
    let (discovery, play) = played();
    play.send(BackendEvent::Reset(vec![record("a", address)]))
        .unwrap();
    let mut events = discovery.watch("n", "c").unwrap();
    assert_eq!(next(&mut events).await, format!("+a@{address}"));
    let listed = discovery.list_instances("n", "c").await.unwrap();
    assert_eq!(listed[0].metadata().models()[0].name, "m");
    let mut changed = (*record("a", address)).clone();
    changed
        .instance
        .labels
        .push(("zone".to_owned(), "b".to_owned()));
    play.send(BackendEvent::Apply(Arc::new(changed))).unwrap();
    assert_eq!(next(&mut events).await, format!("+a@{address}"));
    until(2, || async { asked.load(Ordering::Relaxed) }).await;
    assert_eq!(
        discovery.list_instances("n", "c").await.unwrap()[0]
            .metadata()
            .models()[0]
            .name,
        "m",
        "not modified"
    );
}

#[tokio::test]
async fn no_answer_of_an_instance_does_harm() {
    async fn flood() -> Response {
        Body::from_stream(futures::stream::repeat_with(|| {
            Ok::<_, std::io::Error>(vec![b' '; 1 << 16])
        }))
        .into_response()
    }
    async fn drip() -> Response {
        let drops = futures::stream::unfold((), |()| async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            Some((Ok::<_, std::io::Error>("{"), ()))
        });
        Body::from_stream(drops).into_response()
    }
    let target = Arc::new(AtomicUsize::new(0));
    let hit = Arc::clone(&target);
    let elsewhere = listen(
        Router::new()
            .fallback(move || async move { hit.fetch_add(1, Ordering::Relaxed).to_string() }),
    )
    .await;
    let redirect = move || async move {
        (
            StatusCode::TEMPORARY_REDIRECT,
            [(header::LOCATION, format!("http://{elsewhere}/metadata"))],
        )
    };
    let closed = {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        listener.local_addr().unwrap()
    };
    let (discovery, play) = played();
    let rows = [
        (
            "flood",
            listen(Router::new().route("/metadata", get(flood))).await,
            "longer than",
        ),
        (
            "drip",
            listen(Router::new().route("/metadata", get(drip))).await,
            "no complete answer",
        ),
        (
            "redirect",
            listen(Router::new().route("/metadata", get(redirect))).await,
            "redirects are not followed",
        ),
        (
            "array",
            listen(Router::new().route("/metadata", get(|| async { "[1]" }))).await,
            "not a JSON object",
        ),
        (
            "deep",
            listen(Router::new().route(
                "/metadata",
                get(|| async { "{\"a\":".to_owned() + &"[".repeat(1 << 18) }),
            ))
            .await,
            "recursion",
        ),
        (
            "down",
            listen(Router::new().route(
                "/metadata",
                get(|| async { StatusCode::INTERNAL_SERVER_ERROR }),
            ))
            .await,
            "500",
        ),
        (
            "unasked",
            listen(Router::new().route("/metadata", get(|| async { StatusCode::NOT_MODIFIED })))
                .await,
            "304",
        ),
        ("closed", closed, "refused"),
        (
            "elsewhere",
            listen(Router::new().route(
                "/metadata",
                get(|| async { r#"{"transport":{"address":"10.6.6.6:80"}}"# }),
            ))
            .await,
            "own",
        ),
    ];
    let plain = listen(Router::new()).await;
    let records = rows
        .iter()
        .map(|(name, address, _)| record(name, *address))
        .chain([record("plain", plain)])
        .collect();
    play.send(BackendEvent::Reset(records)).unwrap();
    let mut events = discovery.watch("n", "c").unwrap();
    assert_eq!(
        next(&mut events).await,
        format!("+plain@{plain}"),
        "404: it has none, and is published"
    );
    let followed = discovery.follow("n", "c").unwrap();
    for (name, _, expected) in rows {
        let reason = || {
            let seen = followed
                .seen()
                .into_iter()
                .find(|s| *s.id == *name)
                .unwrap();
            match seen.state {
                InstanceState::Pending(why) | InstanceState::Refused(why) => why,
                other => format!("{other:?}"),
            }
        };
        until(true, || async { reason().contains(expected) }).await;
    }
    assert_eq!(
        target.load(Ordering::Relaxed),
        0,
        "no request went to another host"
    );
    const { assert!(METADATA_BYTES_MAX < 1 << 22) };
}

/// Checks that discovery does not fetch the metadata of all instances at the same time if a hundred
/// instances join together.
#[tokio::test]
async fn the_number_of_concurrent_fetches_is_limited() {
    const ALL: usize = 100;
    let now = Arc::new(AtomicUsize::new(0));
    let most = Arc::new(AtomicUsize::new(0));
    let asked = Arc::clone(&now);
    let peak = Arc::clone(&most);
    let slow = move || async move {
        peak.fetch_max(asked.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(50)).await;
        asked.fetch_sub(1, Ordering::SeqCst);
        "{}"
    };
    let mut records = Vec::new();
    for at in 0..ALL {
        records.push(record(
            &format!("e{at}"),
            listen(Router::new().route("/metadata", get(slow.clone()))).await,
        ));
    }
    let (discovery, play) = played();
    play.send(BackendEvent::Reset(records)).unwrap();
    until(ALL, || async {
        discovery.list_instances("n", "c").await.unwrap().len()
    })
    .await;
    let most = most.load(Ordering::SeqCst);
    assert!((2..=32).contains(&most), "{most} at one time");
}

#[tokio::test]
async fn a_reader_that_sleeps_through_more_than_is_queued_is_reconciled() {
    let (discovery, play) = played();
    let bare = |name: &str, port: u16| {
        let instance = Instance::new(name, SocketAddr::from(([10, 0, 0, 1], port)));
        Arc::new(InstanceRecord {
            instance,
            readiness: InstanceReadiness::Ready,
            metadata: MetadataSource::None,
            freshness: 0,
        })
    };
    play.send(BackendEvent::Reset(vec![bare("keeps", 1), bare("goes", 2)]))
        .unwrap();
    let mut events = discovery.watch("n", "c").unwrap();
    let a = next(&mut events).await;
    let b = next(&mut events).await;
    assert_eq!(
        [a, b].map(|e| e.split('@').next().unwrap().to_owned()),
        ["+goes", "+keeps"]
    );
    for _ in 0..5000 {
        play.send(BackendEvent::Apply(bare("churns", 3))).unwrap();
        play.send(BackendEvent::Delete("churns".into())).unwrap();
    }
    play.send(BackendEvent::Delete("goes".into())).unwrap();
    play.send(BackendEvent::Apply(bare("comes", 4))).unwrap();
    until(vec!["comes".to_owned(), "keeps".to_owned()], || async {
        discovery
            .list_instances("n", "c")
            .await
            .unwrap()
            .iter()
            .map(|i| i.name.clone())
            .collect::<Vec<_>>()
    })
    .await;
    let mut left = vec!["+comes@10.0.0.1:4".to_owned(), "-goes".to_owned()];
    while !left.is_empty() {
        let event = next(&mut events).await;
        left.retain(|l| *l != event);
        assert!(left.len() < 2 || event.contains("churns"), "{event}");
    }
}

#[tokio::test]
async fn a_backend_that_was_never_reached_is_said_to_be_and_one_that_was_keeps_its_set() {
    let (discovery, play) = played();
    play.send(BackendEvent::Failed("connection refused".to_owned()))
        .unwrap();
    let error = discovery.list_instances("n", "c").await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "discovery is not possible now: connection refused"
    );
    let (discovery, play) = played();
    let followed = discovery.follow("n", "c").unwrap();
    play.send(BackendEvent::Reset(vec![])).unwrap();
    play.send(BackendEvent::Failed("gone".to_owned())).unwrap();
    until(Some("gone".to_owned()), || async {
        followed.status().borrow().error.clone()
    })
    .await;
    assert_eq!(discovery.list_instances("n", "c").await, Ok(vec![]));
    play.send(BackendEvent::Alive).unwrap();
    until(None, || async { followed.status().borrow().error.clone() }).await;
}
