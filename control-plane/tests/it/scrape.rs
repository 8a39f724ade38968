//! The scraper against servers that behave like engines, and against misbehaving ones.

mod server;
mod tls;

use std::sync::Arc;
use std::time::Duration;

use control_plane::scrape::engine::EngineTable;
use control_plane::scrape::{
    BusyHint, EndpointTls, FailReason, MetricsLocation, PAGE_BYTES_MAX, ScrapeConfig, ScrapeCounts,
    ScrapeEvent, ScrapeIntervals, ScrapeStats, ScrapeTarget, ScrapedMetrics, Scraper,
};
use scheduler::{EndpointRef, Generation, Slot};
use server::{MetricsServer, ServerAnswer, page};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

/// The maximum wait for an event. A test that gets no event for this long fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running scraper with its channels.
struct ScraperHarness {
    targets: watch::Sender<Arc<[ScrapeTarget]>>,
    events: mpsc::Receiver<ScrapeEvent>,
    hint: BusyHint,
    stats: Arc<ScrapeStats>,
    task: tokio::task::JoinHandle<()>,
}

/// Returns a configuration with short intervals, and with a deadline that even a busy machine
/// meets, for tests that are not about deadlines.
fn config() -> ScrapeConfig {
    let intervals = ScrapeIntervals {
        idle: Duration::from_millis(20),
        busy: Duration::from_millis(5),
    };
    ScrapeConfig {
        intervals,
        deadline: PATIENCE,
        ..ScrapeConfig::default()
    }
}

/// Returns a configuration with which the scraper scrapes once, then not again during the test.
fn once() -> ScrapeConfig {
    let long = Duration::from_secs(3600);
    ScrapeConfig {
        intervals: ScrapeIntervals {
            idle: long,
            busy: long,
        },
        ..config()
    }
}

fn id(slot: u16, generation: u32) -> EndpointRef {
    EndpointRef {
        slot: Slot(slot),
        generation: Generation(generation),
    }
}

fn target(id: EndpointRef, address: &str, engine: &str) -> ScrapeTarget {
    target_at(id, address, engine, &MetricsLocation::default())
}

fn target_at(
    id: EndpointRef,
    address: &str,
    engine: &str,
    location: &MetricsLocation,
) -> ScrapeTarget {
    let engine = Arc::clone(
        EngineTable::try_new(&[], "", "")
            .unwrap()
            .get(engine)
            .unwrap(),
    );
    ScrapeTarget {
        id,
        name: address.into(),
        url: location.url(address.parse().unwrap(), &engine).unwrap(),
        engine,
    }
}

impl ScraperHarness {
    fn start(config: &ScrapeConfig, targets: Vec<ScrapeTarget>) -> Self {
        let (scraper, hint, stats) = Scraper::try_new(config).unwrap();
        let (targets, watched) = watch::channel(targets.into());
        let (sender, events) = mpsc::channel(64);
        let task = tokio::spawn(scraper.run(watched, sender));
        Self {
            targets,
            events,
            hint,
            stats,
            task,
        }
    }

    async fn next(&mut self) -> ScrapeEvent {
        timeout(PATIENCE, self.events.recv())
            .await
            .expect("no event in time")
            .expect("the scraper ended")
    }

    async fn metrics(&mut self) -> ScrapedMetrics {
        match self.next().await {
            ScrapeEvent::Metrics(_, observed) => observed,
            other => panic!("metrics expected: {other:?}"),
        }
    }

    /// Waits for the next event, which must be the first failure in a row. Returns its reason.
    async fn failure(&mut self) -> FailReason {
        match self.next().await {
            ScrapeEvent::Failed(_, reason, 1) => reason,
            other => panic!("a first failure expected: {other:?}"),
        }
    }

    fn counts(&self) -> ScrapeCounts {
        self.stats.counts()
    }
}

async fn failure_of(answer: ServerAnswer) -> FailReason {
    let server = MetricsServer::start(answer).await;
    let reason = ScraperHarness::start(&config(), vec![target(id(1, 1), &server.address, "vllm")])
        .failure()
        .await;
    assert!(!server.queries().is_empty());
    reason
}

#[tokio::test]
async fn asks_for_the_needed_families_alone_over_one_connection() {
    let server = MetricsServer::start(ServerAnswer::HonoursFilter(page(2, 3, 0.5))).await;
    let mut rig = ScraperHarness::start(&config(), vec![target(id(1, 1), &server.address, "vllm")]);
    for _ in 0..20 {
        let observed = rig.metrics().await;
        assert_eq!(observed.metrics.queue_depth, Some(2.0));
        assert_eq!(observed.metrics.running_requests, Some(3.0));
        assert_eq!(observed.metrics.kv_cache_utilization, Some(0.5));
        assert_eq!(
            (observed.metrics.kv_blocks, observed.metrics.kv_block_tokens),
            (Some(1000), Some(16))
        );
        assert_eq!(observed.process_start, Some(1.76e9));
        assert!(observed.observed_at.elapsed() < PATIENCE);
    }
    let queries = server.queries();
    assert!(
        queries
            .iter()
            .all(|query| query.contains("name%5B%5D=vllm%3Anum_requests_waiting")),
        "{:?}",
        queries.first()
    );
    assert_eq!(server.connections(), 1);
    let counts = rig.counts();
    assert_eq!(
        (counts.full_pages, counts.lines_skipped, counts.restarts),
        (0, 0, 0)
    );
    assert!(
        counts.polls >= 20 && counts.bytes / counts.polls < 2000,
        "{counts:?}"
    );
}

#[tokio::test]
async fn falls_back_to_the_whole_page_for_those_that_answer_a_filter_with_nothing() {
    let server = MetricsServer::start(ServerAnswer::EmptyWhenFiltered(page(1, 1, 0.1))).await;
    let mut rig = ScraperHarness::start(&config(), vec![target(id(1, 1), &server.address, "vllm")]);
    for _ in 0..10 {
        assert_eq!(rig.metrics().await.metrics.queue_depth, Some(1.0));
    }
    let filtered = server
        .queries()
        .iter()
        .filter(|query| !query.is_empty())
        .count();
    assert_eq!(filtered, 1, "one comparison is enough");
    assert_eq!(
        server.connections(),
        1,
        "the rest of a page is read to keep the connection"
    );
}

#[tokio::test]
async fn falls_back_where_queries_are_refused() {
    let server = MetricsServer::start(ServerAnswer::RefusesQueries(page(1, 0, 0.0))).await;
    let mut rig = ScraperHarness::start(&config(), vec![target(id(1, 1), &server.address, "vllm")]);
    assert_eq!(rig.metrics().await.metrics.queue_depth, Some(1.0));
    assert_eq!(rig.metrics().await.metrics.queue_depth, Some(1.0));
    assert_eq!(
        server
            .queries()
            .iter()
            .filter(|query| !query.is_empty())
            .count(),
        1
    );
}

#[tokio::test]
async fn servers_that_ignore_the_filter_are_as_good() {
    let server = MetricsServer::start(ServerAnswer::Page(page(4, 0, 0.0))).await;
    let mut rig = ScraperHarness::start(&config(), vec![target(id(1, 1), &server.address, "vllm")]);
    for _ in 0..3 {
        assert_eq!(rig.metrics().await.metrics.queue_depth, Some(4.0));
    }
    assert_eq!(rig.counts().full_pages, 0);
}

#[tokio::test]
async fn what_an_engine_does_not_have_is_not_asked_for_twice() {
    let server = MetricsServer::start(ServerAnswer::HonoursFilter(
        "nv_inference_pending_request_count 3\nother 1\n".into(),
    ))
    .await;
    let location = MetricsLocation {
        port: Some(server.port()),
        ..MetricsLocation::default()
    };
    let mut rig = ScraperHarness::start(
        &config(),
        vec![target_at(id(1, 1), "127.0.0.1:1", "triton", &location)],
    );
    let partial = MetricsServer::start(ServerAnswer::HonoursFilter(
        "vllm:num_requests_waiting 3\nother 1\n".into(),
    ))
    .await;
    let mut partial_rig =
        ScraperHarness::start(&config(), vec![target(id(1, 1), &partial.address, "vllm")]);
    for _ in 0..5 {
        assert_eq!(rig.metrics().await.metrics.queue_depth, Some(3.0));
        assert_eq!(partial_rig.metrics().await.metrics.running_requests, None);
    }
    assert_eq!(rig.counts().full_pages, 0);
    assert_eq!(partial_rig.counts().full_pages, 1, "one comparison");
}

#[tokio::test]
async fn a_new_process_is_noticed_and_asked_with_the_filter_again() {
    let server = MetricsServer::start(ServerAnswer::EmptyWhenFiltered(page(1, 1, 0.1))).await;
    let mut rig = ScraperHarness::start(&config(), vec![target(id(1, 1), &server.address, "vllm")]);
    rig.metrics().await;
    rig.metrics().await;
    server.answer(ServerAnswer::HonoursFilter(
        page(0, 0, 0.0).replace("1.76e+09", "1.77e+09"),
    ));
    let mut restarts = 0;
    loop {
        match rig.next().await {
            ScrapeEvent::Restarted(which) => {
                assert_eq!(which, id(1, 1));
                restarts += 1;
            }
            ScrapeEvent::Metrics(_, observed) if observed.process_start == Some(1.77e9) => break,
            ScrapeEvent::Metrics(_, observed) => assert_eq!(observed.process_start, Some(1.76e9)),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(
        (restarts, rig.counts().restarts),
        (1, 1),
        "reported once, and before any metrics of the new process"
    );
    let before = server.queries().len();
    rig.metrics().await;
    rig.metrics().await;
    assert!(
        server.queries()[before..]
            .iter()
            .all(|query| !query.is_empty()),
        "filtered again"
    );
}

#[tokio::test]
async fn redirects_are_not_followed() {
    let elsewhere = MetricsServer::start(ServerAnswer::Page(page(9, 9, 0.9))).await;
    let reason = failure_of(ServerAnswer::Redirect(format!(
        "http://{}/metrics",
        elsewhere.address
    )))
    .await;
    assert_eq!(reason, FailReason::Redirect(302));
    assert_eq!(elsewhere.queries().len(), 0);
}

#[tokio::test]
async fn every_way_to_fail_has_its_name() {
    assert_eq!(
        failure_of(ServerAnswer::Status(503)).await,
        FailReason::Status(503)
    );
    assert_eq!(
        failure_of(ServerAnswer::Status(404)).await,
        FailReason::Status(404)
    );
    assert_eq!(
        failure_of(ServerAnswer::Status(204)).await,
        FailReason::Status(204)
    );
    assert_eq!(
        failure_of(ServerAnswer::Compressed).await,
        FailReason::Encoding
    );
    assert_eq!(
        failure_of(ServerAnswer::Huge { announced: true }).await,
        FailReason::TooLarge
    );
    assert_eq!(
        failure_of(ServerAnswer::Huge { announced: false }).await,
        FailReason::TooLarge
    );
    assert_eq!(
        failure_of(ServerAnswer::Page("<html>not metrics</html>\n".into())).await,
        FailReason::NoMetrics
    );
    assert_eq!(
        failure_of(ServerAnswer::Page(String::new())).await,
        FailReason::NoMetrics
    );
    assert!(
        matches!(
            failure_of(ServerAnswer::CutShort(page(1, 1, 0.1))).await,
            FailReason::Broken(_)
        ),
        "half a page may lack half of a sum"
    );
    assert!(matches!(
        failure_of(ServerAnswer::NotHttp).await,
        FailReason::Broken(_)
    ));
    let closed = {
        std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
    };
    let reason = ScraperHarness::start(
        &config(),
        vec![target(id(1, 1), &closed.to_string(), "vllm")],
    )
    .failure()
    .await;
    assert!(
        matches!(&reason, FailReason::Connect(detail) if detail.contains("refused")),
        "{reason:?}"
    );
}

#[tokio::test]
async fn slow_and_silent_endpoints_meet_the_deadline() {
    let config = ScrapeConfig {
        deadline: Duration::from_millis(100),
        ..once()
    };
    for answer in [ServerAnswer::Silent, ServerAnswer::Trickle] {
        let server = MetricsServer::start(answer).await;
        let mut rig =
            ScraperHarness::start(&config, vec![target(id(1, 1), &server.address, "vllm")]);
        assert_eq!(rig.failure().await, FailReason::Timeout);
        let timeouts = rig
            .counts()
            .failures
            .into_iter()
            .find(|(kind, _)| *kind == "timeout");
        assert_eq!(timeouts, Some(("timeout", 1)));
    }
}

/// Checks the names of models. An engine that serves adapters lists the names of its base model.
/// The label of the metrics has the first name.
#[tokio::test]
async fn names_of_a_base_model_come_from_the_list_of_models() {
    let lora = r#"vllm:lora_requests_info{max_lora="2",running_lora_adapters="sql",waiting_lora_adapters=""} 1"#;
    let server =
        MetricsServer::start(ServerAnswer::Page(format!("{}{lora}\n", page(1, 2, 0.5)))).await;
    let list = r#"{"data":[{"id":"m","root":"/m"},{"id":"chat","root":"/m"},{"id":"sql","root":"/a","parent":"m"}]}"#;
    server.answer_models(ServerAnswer::Page(list.to_owned()));
    let base_models =
        |observed: ScrapedMetrics| observed.metrics.lora.map(|lora| lora.base_models.join(" "));
    let mut rig = ScraperHarness::start(&config(), vec![target(id(1, 1), &server.address, "vllm")]);
    for _ in 0..5 {
        assert_eq!(base_models(rig.metrics().await).as_deref(), Some("m chat"));
    }
    let lists = server
        .queries()
        .iter()
        .filter(|query| *query == "models")
        .count();
    assert_eq!(lists, 1, "the list is not read with each page");
    for answer in [
        ServerAnswer::Status(401),
        ServerAnswer::Silent,
        ServerAnswer::Huge { announced: false },
        ServerAnswer::Page("{".into()),
    ] {
        server.answer_models(answer);
        let mut rig =
            ScraperHarness::start(&config(), vec![target(id(1, 1), &server.address, "vllm")]);
        assert_eq!(
            base_models(rig.metrics().await).as_deref(),
            Some("m"),
            "the label alone"
        );
    }
}

#[tokio::test]
async fn garbage_around_the_metrics_is_skipped_and_counted() {
    let server = MetricsServer::start(ServerAnswer::Page(format!(
        "\u{0}\u{1}garbage\n{}}}{{\n",
        page(1, 2, 0.5)
    )))
    .await;
    let mut rig = ScraperHarness::start(&once(), vec![target(id(1, 1), &server.address, "vllm")]);
    assert_eq!(rig.metrics().await.metrics.running_requests, Some(2.0));
    assert_eq!(rig.counts().lines_skipped, 2);
}

#[tokio::test]
async fn a_hanging_endpoint_delays_no_other() {
    let hanging = MetricsServer::start(ServerAnswer::Silent).await;
    let good = MetricsServer::start(ServerAnswer::Page(page(1, 0, 0.0))).await;
    let targets = vec![
        target(id(1, 1), &hanging.address, "vllm"),
        target(id(2, 1), &good.address, "vllm"),
    ];
    let mut rig = ScraperHarness::start(&config(), targets);
    for _ in 0..5 {
        assert!(matches!(rig.next().await, ScrapeEvent::Metrics(which, _) if which == id(2, 1)));
    }
}

#[tokio::test]
async fn failures_are_counted_in_a_row_and_recovery_ends_the_count() {
    let server = MetricsServer::start(ServerAnswer::Status(503)).await;
    let mut rig = ScraperHarness::start(&config(), vec![target(id(1, 1), &server.address, "vllm")]);
    for row in 1..=3 {
        assert_eq!(
            rig.next().await,
            ScrapeEvent::Failed(id(1, 1), FailReason::Status(503), row)
        );
    }
    server.answer(ServerAnswer::Page(page(1, 0, 0.0)));
    rig.metrics().await;
    server.answer(ServerAnswer::Status(500));
    while let ScrapeEvent::Metrics(..) = rig.next().await {}
    assert!(matches!(
        rig.next().await,
        ScrapeEvent::Failed(_, FailReason::Status(500), 2)
    ));
}

#[tokio::test]
async fn targets_come_and_go() {
    let first = MetricsServer::start(ServerAnswer::Page(page(1, 0, 0.0))).await;
    let second = MetricsServer::start(ServerAnswer::Page(page(2, 0, 0.0))).await;
    let mut rig = ScraperHarness::start(&config(), vec![target(id(1, 1), &first.address, "vllm")]);
    assert_eq!(rig.metrics().await.metrics.queue_depth, Some(1.0));
    rig.targets
        .send_replace([target(id(1, 2), &second.address, "vllm")].into());
    let heard = loop {
        // A scrape that was running when the set changed may still report, but only for the old
        // generation.
        match rig.next().await {
            ScrapeEvent::Metrics(which, _) if which == id(1, 1) => {}
            other => break other,
        }
    };
    assert!(
        matches!(heard, ScrapeEvent::Metrics(which, observed) if which == id(1, 2) && observed.metrics.queue_depth == Some(2.0))
    );
    rig.targets.send_replace([].into());
    while let Ok(event) = timeout(Duration::from_millis(200), rig.events.recv()).await {
        assert!(event.is_some());
    }
}

#[tokio::test]
async fn picked_endpoints_are_asked_at_once() {
    let server = MetricsServer::start(ServerAnswer::Page(page(0, 0, 0.0))).await;
    let intervals = ScrapeIntervals {
        idle: Duration::from_secs(3600),
        busy: Duration::from_millis(5),
    };
    let mut rig = ScraperHarness::start(
        &ScrapeConfig {
            intervals,
            ..config()
        },
        vec![target(id(1, 1), &server.address, "vllm")],
    );
    rig.metrics().await;
    rig.hint.hint(id(1, 1));
    rig.hint.hint(id(7, 7)); // This endpoint is unknown.
    rig.metrics().await;
    rig.metrics().await;
}

#[tokio::test]
async fn ends_with_either_side() {
    let rig = ScraperHarness::start(&config(), vec![]);
    drop(rig.targets);
    timeout(PATIENCE, rig.task).await.unwrap().unwrap();
    let rig = ScraperHarness::start(&config(), vec![]);
    drop(rig.events);
    timeout(PATIENCE, rig.task).await.unwrap().unwrap();
}

#[tokio::test]
async fn all_of_a_hundred_endpoints_are_scraped() {
    let server = MetricsServer::start(ServerAnswer::HonoursFilter(page(1, 1, 0.1))).await;
    let targets: Vec<ScrapeTarget> = (0..100)
        .map(|slot| target(id(slot, 1), &server.address, "vllm"))
        .collect();
    let mut rig = ScraperHarness::start(&config(), targets);
    let mut heard = std::collections::BTreeSet::new();
    while heard.len() < 100 {
        match rig.next().await {
            ScrapeEvent::Metrics(which, _) => heard.insert(which),
            other => panic!("{other:?}"),
        };
    }
}

#[test]
fn urls_lead_to_the_endpoint_and_nowhere_else() {
    let engines = EngineTable::try_new(&[], "", "").unwrap();
    let url = |address: &str, engine: &str, location: &MetricsLocation| {
        location
            .url(address.parse().unwrap(), engines.get(engine).unwrap())
            .is_ok()
    };
    let here = MetricsLocation::default();
    for good in ["10.0.0.1:8000", "[2001:db8::1]:8000"] {
        assert!(url(good, "vllm", &here), "{good}");
    }
    for bad in ["metrics", "//evil\\", "/metrics?x", "/metrics#x", "/a\nb"] {
        assert!(
            !url(
                "10.0.0.1:80",
                "vllm",
                &MetricsLocation {
                    path: Some(bad.into()),
                    ..here.clone()
                }
            ),
            "{bad}"
        );
    }
    let shown = |engine: &str, location: &MetricsLocation| {
        location
            .url(
                "10.0.0.1:8000".parse().unwrap(),
                engines.get(engine).unwrap(),
            )
            .unwrap()
            .to_string()
    };
    assert_eq!(shown("vllm", &here), "http://10.0.0.1:8000/metrics");
    assert_eq!(
        shown("trtllm-serve", &here),
        "http://10.0.0.1:8000/prometheus/metrics"
    );
    assert_eq!(shown("triton", &here), "http://10.0.0.1:8002/metrics");
    let there = MetricsLocation {
        https: true,
        port: Some(9),
        path: Some("/m".into()),
    };
    assert_eq!(shown("triton", &there), "https://10.0.0.1:9/m");
    assert_eq!(
        shown(
            "vllm",
            &MetricsLocation {
                path: Some("//other.host/".into()),
                ..here
            }
        ),
        "http://10.0.0.1:8000//other.host/"
    );
    assert!(PAGE_BYTES_MAX > 1_000_000 && EndpointTls::default().ca_file.is_none());
}
