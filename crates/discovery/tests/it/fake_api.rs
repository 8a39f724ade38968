//! A fake Kubernetes API server for faults that a real server does not show on demand. The fake
//! server refuses requests, breaks off within a line, stays silent, omits events of a watch, or
//! loses its history.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use futures::stream::{self, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::broadcast;

/// A fault that a test requests from the fake server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ApiFault {
    /// The next request of this kind (`true`: a watch) gets this status.
    Refuse(bool, u16),
    /// The next watch breaks off in the middle of an event.
    HalfALine,
    /// The next watch reports that its resource version is too old.
    Expired,
    /// The next watch ends immediately, without an error.
    Ends,
    /// The next watch is silent and does not end, as in a network that drops packets.
    Stalls,
}

#[derive(Clone)]
pub(crate) struct FakeApi {
    world: Arc<Mutex<FakeApiState>>,
    events: broadcast::Sender<(String, Value)>,
    /// A message on this channel ends open watches without an error.
    ends: broadcast::Sender<()>,
    pub(crate) url: String,
}

#[derive(Clone, Default)]
pub(crate) struct FakeApiState {
    version: u64,
    /// The objects by plural and name.
    objects: BTreeMap<(String, String), Value>,
    /// Events for watches, by version and plural: a watch that starts at an older version also gets
    /// these events.
    history: Vec<(u64, String, Value)>,
    faults: VecDeque<ApiFault>,
    /// The requests and their answers.
    log: Vec<String>,
    down: bool,
}

impl FakeApi {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let fake = Self {
            world: Arc::default(),
            events: broadcast::Sender::new(4096),
            ends: broadcast::Sender::new(16),
            url,
        };
        let router = Router::new()
            .route("/api/v1/namespaces/{namespace}/{plural}", get(objects))
            .route(
                "/api/v1/namespaces/{namespace}/{plural}/{name}",
                get(object),
            )
            .route(
                "/apis/{group}/{version}/namespaces/{namespace}/{plural}",
                get(grouped),
            )
            .with_state(fake.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        fake
    }

    pub(crate) fn client(&self) -> kube::Client {
        discovery::kubernetes::client(kube::Config::new(self.url.parse().unwrap())).unwrap()
    }

    pub(crate) fn fault(&self, fault: ApiFault) {
        self.world().faults.push_back(fault);
    }

    pub(crate) fn faults_left(&self) -> usize {
        self.world().faults.len()
    }

    /// Makes the server go down or come back. While the server is down, every request gets 503, and
    /// open watches stay open and silent.
    pub(crate) fn set_down(&self, down: bool) {
        self.world().down = down;
    }

    /// Returns a copy of all state, for [`Self::restore`].
    pub(crate) fn backup(&self) -> FakeApiState {
        self.world().clone()
    }

    /// Restores a copy, like a restore of etcd: objects and versions are those of the copy, and
    /// open watches get no event.
    pub(crate) fn restore(&self, backup: FakeApiState) {
        let FakeApiState {
            version,
            objects,
            history,
            ..
        } = backup;
        let mut world = self.world();
        world.version = version;
        world.objects = objects;
        world.history = history;
    }

    /// Ends every open watch without an error.
    pub(crate) fn end_watches(&self) {
        let _ = self.ends.send(()); // there may be no watch
    }

    pub(crate) fn put(&self, plural: &str, object: Value) {
        self.put_with_event_if(plural, object, true);
    }

    /// Adds an object without an event for open watches, as if the event were lost.
    pub(crate) fn put_unannounced(&self, plural: &str, object: Value) {
        self.put_with_event_if(plural, object, false);
    }

    pub(crate) fn delete(&self, plural: &str, name: &str) {
        let mut world = self.world();
        world.version += 1;
        if let Some(mut object) = world.objects.remove(&(plural.to_owned(), name.to_owned())) {
            object["metadata"]["resourceVersion"] = world.version.to_string().into();
            self.tell(
                &mut world,
                plural,
                json!({ "type": "DELETED", "object": object }),
            );
        }
    }

    pub(crate) fn requests(&self) -> Vec<String> {
        self.world().log.clone()
    }

    fn put_with_event_if(&self, plural: &str, mut object: Value, announced: bool) {
        let mut world = self.world();
        world.version += 1;
        object["metadata"]["resourceVersion"] = world.version.to_string().into();
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        let kind = if world
            .objects
            .insert((plural.to_owned(), name), object.clone())
            .is_some()
        {
            "MODIFIED"
        } else {
            "ADDED"
        };
        if announced {
            self.tell(
                &mut world,
                plural,
                json!({ "type": kind, "object": object }),
            );
        }
    }

    fn tell(&self, world: &mut FakeApiState, plural: &str, event: Value) {
        world
            .history
            .push((world.version, plural.to_owned(), event.clone()));
        let _ = self.events.send((plural.to_owned(), event)); // there may be no watch
    }

    fn world(&self) -> MutexGuard<'_, FakeApiState> {
        self.world.lock().unwrap()
    }

    fn answer(&self, plural: &str, query: &BTreeMap<String, String>) -> Response {
        let watch = query.get("watch").is_some_and(|w| w == "true" || w == "1");
        // Subscribes before the version is read, so that the watch misses nothing.
        let announced = self.events.subscribe();
        let mut ends = self.ends.subscribe();
        let mut world = self.world();
        let of_this = |fault: &ApiFault| {
            matches!(fault, ApiFault::Refuse(w, _) if *w == watch)
                || (watch && !matches!(fault, ApiFault::Refuse(..)))
        };
        let fault = world
            .faults
            .iter()
            .position(of_this)
            .and_then(|at| world.faults.remove(at));
        let what = if watch { "watch" } else { "list" };
        world.log.push(format!("{what} {plural} {fault:?}"));
        if world.down {
            return status(503, "down");
        }
        if let Some(ApiFault::Refuse(_, code)) = fault {
            return status(code, "refused by the test");
        }
        let selector = query.get("labelSelector").cloned().unwrap_or_default();
        let wanted = query
            .get("fieldSelector")
            .and_then(|f| f.strip_prefix("metadata.name="))
            .map(str::to_owned);
        let picks = move |object: &Value| {
            selected(object, &selector)
                && wanted
                    .as_ref()
                    .is_none_or(|w| object["metadata"]["name"] == **w)
        };
        if !watch {
            let items: Vec<&Value> = world
                .objects
                .iter()
                .filter(|((p, _), o)| p == plural && picks(o))
                .map(|(_, o)| o)
                .collect();
            return Json(json!({ "metadata": { "resourceVersion": world.version.to_string() }, "items": items })).into_response();
        }
        let since: u64 = query
            .get("resourceVersion")
            .and_then(|v| v.parse().ok())
            .unwrap_or(0);
        let missed: Vec<Value> = world
            .history
            .iter()
            .filter(|(version, p, event)| {
                *version > since && p == plural && picks(&event["object"])
            })
            .map(|(_, _, event)| event.clone())
            .collect();
        let first = match fault {
            Some(ApiFault::HalfALine) => {
                return broken(r#"{"type":"MODIFIED","object":{"metadata":{"na"#);
            }
            Some(ApiFault::Expired) => {
                let object = json!({ "kind": "Status", "status": "Failure", "reason": "Expired", "code": 410, "message": "too old" });
                return Body::from(format!(
                    "{}\n",
                    json!({ "type": "ERROR", "object": object })
                ))
                .into_response();
            }
            Some(ApiFault::Ends) => return Body::empty().into_response(),
            Some(ApiFault::Stalls) => {
                return Body::from_stream(stream::pending::<Result<Bytes, std::io::Error>>())
                    .into_response();
            }
            _ => stream::iter(missed),
        };
        let seconds = query
            .get("timeoutSeconds")
            .and_then(|v| v.parse().ok())
            .unwrap_or(u64::from(u32::MAX));
        let end = async move {
            drop(tokio::time::timeout(Duration::from_secs(seconds), ends.recv()).await);
        };
        let plural = plural.to_owned();
        let rest =
            tokio_stream::wrappers::BroadcastStream::new(announced).filter_map(move |event| {
                let event = event
                    .ok()
                    .filter(|(p, event)| *p == plural && picks(&event["object"]))
                    .map(|(_, event)| event);
                std::future::ready(event)
            });
        Body::from_stream(
            first
                .chain(rest)
                .take_until(Box::pin(end))
                .map(|event| Ok::<_, std::io::Error>(Bytes::from(format!("{event}\n")))),
        )
        .into_response()
    }
}

async fn objects(
    State(fake): State<FakeApi>,
    Path((_, plural)): Path<(String, String)>,
    Query(query): Query<BTreeMap<String, String>>,
) -> Response {
    fake.answer(&plural, &query)
}

async fn object(
    State(fake): State<FakeApi>,
    Path((_, plural, name)): Path<(String, String, String)>,
) -> Response {
    match fake.world().objects.get(&(plural, name)) {
        Some(object) => Json(object.clone()).into_response(),
        None => status(404, "NotFound"),
    }
}

async fn grouped(
    State(fake): State<FakeApi>,
    Path((_, _, _, plural)): Path<(String, String, String, String)>,
    Query(query): Query<BTreeMap<String, String>>,
) -> Response {
    fake.answer(&plural, &query)
}

/// Returns whether the object matches the selector: `a=b,c=d` or `a in (b,c)`.
fn selected(object: &Value, selector: &str) -> bool {
    let label = |key: &str| {
        object["metadata"]["labels"]
            .get(key)
            .and_then(Value::as_str)
    };
    match selector.split_once(" in (") {
        Some((key, values)) => values
            .trim_end_matches(')')
            .split(',')
            .any(|value| label(key) == Some(value)),
        None => selector
            .split(',')
            .filter_map(|pair| pair.split_once('='))
            .all(|(key, value)| label(key) == Some(value)),
    }
}

fn status(code: u16, why: &str) -> Response {
    let body = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": why, "message": why, "code": code });
    (StatusCode::from_u16(code).unwrap(), Json(body)).into_response()
}

/// Sends this text and then breaks the connection.
fn broken(text: &'static str) -> Response {
    let end = Err(std::io::Error::other("broken by the test"));
    Body::from_stream(stream::iter([Ok(Bytes::from_static(text.as_bytes())), end])).into_response()
}
