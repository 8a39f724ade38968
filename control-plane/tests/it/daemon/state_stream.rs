//! The state stream, used as filters use it, and in ways that no filter should.

use std::time::{Duration, Instant};

use control_plane::scrape::{FailReason, ScrapeEvent, ScrapedMetrics};
use control_plane::state::peer_relay::SHARE_INTERVAL;
use prost::Message as _;
use proto::state::{self, daemon_message::Message, proxy_message};
use scheduler::metrics::QUEUE_DEPTH;
use scheduler::{EndpointMetrics, EndpointRef, Generation, Slot};
use tonic::Code;

use super::calls::CallClient;
use super::harness::{DaemonHarness, FilterStream, instance, names, until};

async fn refused(rig: &DaemonHarness, message: proxy_message::Message) -> tonic::Status {
    let mut filter = FilterStream::silent(rig.address).await;
    filter.say(message).await;
    loop {
        match filter.next().await {
            Ok(_) => {}
            Err(status) => return status,
        }
    }
}

fn hello(schema: u32, pools: Vec<String>) -> proxy_message::Message {
    proxy_message::Message::Hello(state::Hello {
        schema,
        node_id: "n".to_owned(),
        process_id: 1,
        pools,
        ..state::Hello::default()
    })
}

fn observed(queue: f32) -> ScrapedMetrics {
    let metrics = EndpointMetrics {
        queue_depth: Some(queue),
        ..EndpointMetrics::default()
    };
    ScrapedMetrics {
        metrics,
        process_start: None,
        computed_tokens: None,
        adapters: [].into(),
        observed_at: tokio::time::Instant::now(),
    }
}

fn queue_depths(message: &state::Metrics) -> &[f32] {
    &message
        .columns
        .iter()
        .find(|column| column.name == QUEUE_DEPTH.name)
        .expect("no column of queue depths")
        .values
}

fn first_id(pool_update: &state::PoolUpdate) -> EndpointRef {
    let e = &pool_update.endpoints[0];
    EndpointRef {
        slot: Slot(u16::try_from(e.slot).unwrap()),
        generation: Generation(e.generation),
    }
}

#[tokio::test]
async fn hello_is_answered_by_welcome_pool_update_and_metrics() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let (mut filter, welcome) = FilterStream::connect(rig.address, "n", 1, &["default"]).await;
    assert_eq!(
        (welcome.schema, welcome.unknown_pools.len()),
        (proto::SCHEMA, 0)
    );
    let pool_update = filter.pool_update().await;
    let half = |secret: u64| u128::from(secret);
    let secret = half(pool_update.hash_secret_high) << 64 | half(pool_update.hash_secret);
    assert_eq!(
        (
            pool_update.pool.as_str(),
            secret,
            pool_update.staleness_max_ms
        ),
        ("default", rig.shared.life.pool_hash_secret("default"), 5000)
    );
    assert_eq!(pool_update.version.unwrap().term, 7);
    let metrics = filter.metrics().await;
    assert_eq!(metrics.pool_update, pool_update.version);
    let decoded = proto::pool_update(pool_update).unwrap();
    assert_eq!(decoded.snapshot.endpoints().len(), 1);
    assert!(proto::metrics(&metrics, &decoded.snapshot).is_ok());
    let default = scheduler::Pipeline::build(&scheduler::PipelineSpec::default()).unwrap();
    assert_eq!(
        format!("{:?}", decoded.snapshot.pipeline()),
        format!("{default:?}"),
        "a pool without a configuration has the default pipeline"
    );
}

#[tokio::test]
async fn metrics_come_soon_after_a_scrape_and_as_a_heartbeat() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let (mut filter, _) = FilterStream::connect(rig.address, "n", 1, &["default"]).await;
    let id = first_id(&filter.pool_update().await);
    let mut sequence = filter.metrics().await.sequence;
    for _ in 0..3 {
        let asked = Instant::now();
        let beat = filter.metrics().await;
        assert!(
            asked.elapsed() < 4 * Duration::from_millis(proto::METRICS_INTERVAL_MAX_MS),
            "no heartbeat"
        );
        assert!(beat.sequence > sequence);
        sequence = beat.sequence;
    }
    rig.scraped(ScrapeEvent::Metrics(id, observed(5.0))).await;
    while queue_depths(&filter.metrics().await) != [5.0] {}
    let other_life = EndpointRef {
        generation: Generation(id.generation.0 + 100),
        ..id
    };
    rig.scraped(ScrapeEvent::Metrics(other_life, observed(6.0)))
        .await;
    rig.scraped(ScrapeEvent::Failed(id, FailReason::Timeout, 1))
        .await;
    for _ in 0..3 {
        assert_eq!(
            queue_depths(&filter.metrics().await),
            [5.0],
            "an event of another generation, or a failed scrape, changed the metrics"
        );
    }
}

#[tokio::test]
async fn a_restarted_engine_is_another_life_in_the_same_slot() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let (mut filter, _) = FilterStream::connect(rig.address, "n", 1, &["default"]).await;
    let before = filter.pool_update().await;
    let id = first_id(&before);
    rig.scraped(ScrapeEvent::Metrics(id, observed(5.0))).await;
    rig.scraped(ScrapeEvent::Restarted(id)).await;
    let after = filter.pool_update().await;
    assert_eq!(after.endpoints[0].slot, before.endpoints[0].slot);
    assert!(after.endpoints[0].generation > before.endpoints[0].generation);
    assert!(after.version.unwrap().sequence > before.version.unwrap().sequence);
    assert!(
        queue_depths(&filter.metrics().await)[0].is_nan(),
        "metrics of the old process do not apply to the new one"
    );
}

#[tokio::test]
async fn a_schema_that_is_too_old_is_refused_by_name() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let status = refused(&rig, hello(proto::SCHEMA_MIN - 1, vec![])).await;
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert!(
        status
            .message()
            .contains(&format!("schema {}", proto::SCHEMA_MIN - 1)),
        "{}",
        status.message()
    );
}

/// Checks that the Welcome makes a module of the next release use this release's schema.
#[tokio::test]
async fn a_newer_filter_is_served_in_the_schema_of_the_daemon() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    for (theirs, common) in [
        (proto::SCHEMA_MIN, proto::SCHEMA_MIN),
        (proto::SCHEMA + 1, proto::SCHEMA),
    ] {
        let mut filter = FilterStream::silent(rig.address).await;
        filter
            .hello(theirs, "n", u64::from(theirs), &["default"])
            .await;
        let Ok(Message::Welcome(welcome)) = filter.next().await else {
            panic!("no welcome")
        };
        assert_eq!(welcome.schema, common);
        assert_eq!(names(&filter.pool_update().await), ["a"]);
    }
}

#[tokio::test]
async fn what_breaks_the_protocol_ends_the_stream_with_the_reason() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let first = refused(
        &rig,
        proxy_message::Message::Report(state::Report::default()),
    )
    .await;
    assert!(first.message().contains("Hello"), "{first}");
    let many = refused(
        &rig,
        hello(proto::SCHEMA, (0..1000).map(|i| i.to_string()).collect()),
    )
    .await;
    assert!(many.message().contains("more than 256"), "{many}");
    let long = refused(&rig, hello(proto::SCHEMA, vec!["x".repeat(100_000)])).await;
    assert!(long.message().contains("longer"), "{long}");
    let (mut filter, _) = FilterStream::connect(rig.address, "n", 1, &["default"]).await;
    filter.hello(proto::SCHEMA, "n", 1, &[]).await;
    let twice = loop {
        if let Err(status) = filter.next().await {
            break status;
        }
    };
    assert!(twice.message().contains("second Hello"), "{twice}");
}

#[tokio::test]
async fn an_unknown_pool_is_named_and_the_others_served() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let (mut filter, welcome) =
        FilterStream::connect(rig.address, "n", 1, &["default", "defualt"]).await;
    assert_eq!(welcome.unknown_pools, ["defualt"]);
    assert_eq!(filter.pool_update().await.pool, "default");
}

#[tokio::test]
async fn a_newer_stream_of_a_process_takes_over() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let (mut old, _) = FilterStream::connect(rig.address, "n", 1, &["default"]).await;
    let before = old.pool_update().await;
    let (mut new, _) = FilterStream::connect(rig.address, "n", 1, &["default"]).await;
    let status = loop {
        if let Err(status) = old.next().await {
            break status;
        }
    };
    assert_eq!(status.code(), Code::Aborted);
    let after = new.pool_update().await;
    assert!(
        after.version.unwrap().sequence > before.version.unwrap().sequence,
        "a process never sees versions go back"
    );
    assert_eq!(rig.shared.proxies.streams.borrow().len(), 1);
}

#[tokio::test]
async fn a_refused_pool_update_is_remembered_with_its_reason_and_acknowledges_nothing() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let (mut filter, _) = FilterStream::connect(rig.address, "n", 1, &["default"]).await;
    let pool_update = filter.pool_update_unanswered().await;
    filter.ack(&pool_update, "slot 7 twice").await;
    let refused = || async {
        rig.shared
            .proxies
            .streams
            .borrow()
            .values()
            .any(|p| p.pools["default"].refused.as_deref() == Some("slot 7 twice"))
    };
    until("the refusal is seen", refused).await;
    assert_eq!(rig.shared.reports.counters().pool_updates_refused, 1);
    assert!(!rig.shared.proxies.acknowledged("default", 1));
    // An acknowledgement of a version that was not sent changes nothing.
    let mut forged = pool_update.clone();
    forged.version.as_mut().unwrap().sequence += 1000;
    filter.ack(&forged, "").await;
    filter.metrics().await;
    assert!(!rig.shared.proxies.acknowledged("default", 1));
}

/// Returns a message that has this many bytes when it is encoded: a refusal with a long reason.
fn refusal_of(bytes: usize) -> proxy_message::Message {
    let with_reason = |length: usize| {
        proxy_message::Message::Ack(state::Ack {
            pool: "default".to_owned(),
            refused: "x".repeat(length),
            ..state::Ack::default()
        })
    };
    let size = |message| {
        let message = state::ProxyMessage {
            message: Some(message),
        };
        message.encoded_len()
    };
    // The lengths of both texts take the same number of bytes.
    let around = size(with_reason(bytes - 64)) - (bytes - 64);
    let message = with_reason(bytes - around);
    assert_eq!(size(message.clone()), bytes);
    message
}

#[tokio::test]
async fn both_transports_take_a_message_of_the_maximum_size_and_refuse_one_byte_more() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let taken = || rig.shared.reports.counters().pool_updates_refused;
    let (mut filter, _) = FilterStream::connect(rig.address, "n", 1, &["default"]).await;
    filter.say(refusal_of(proto::PROXY_MESSAGE_BYTES_MAX)).await;
    until("the stream takes it", async || taken() == 1).await;
    filter
        .say(refusal_of(proto::PROXY_MESSAGE_BYTES_MAX + 1))
        .await;
    while filter.next().await.is_ok() {}
    let caller = CallClient::hello(rig.address, 2, 2).await;
    let (status, _) = caller
        .tell(vec![refusal_of(proto::PROXY_MESSAGE_BYTES_MAX)])
        .await;
    assert_eq!(status, 200);
    until("the call takes it", async || taken() == 2).await;
    let (status, _) = caller
        .tell(vec![refusal_of(proto::PROXY_MESSAGE_BYTES_MAX + 1)])
        .await;
    assert_eq!(status, 413);
    // Only the stream has ended.
    assert_eq!(names(&caller.pool_update().await), ["a"]);
    let (mut again, _) = FilterStream::connect(rig.address, "n", 1, &["default"]).await;
    assert_eq!(names(&again.pool_update().await), ["a"]);
    assert_eq!(taken(), 2);
}

#[tokio::test]
async fn a_slow_reader_is_sent_the_newest_and_not_what_it_missed() {
    let large = |revision: u16| {
        let label = |i: u16| {
            vec![
                ("generation".to_owned(), revision.to_string()),
                ("pad".to_owned(), "x".repeat(2000 + usize::from(i % 7))),
            ]
        };
        (0..1000)
            .map(|i| discovery::Instance {
                labels: label(i),
                ..instance(&format!("e{i}"), i + 1)
            })
            .collect::<Vec<_>>()
    };
    let rig = DaemonHarness::start(large(0)).await;
    let (mut filter, _) = FilterStream::connect(rig.address, "n", 1, &["default"]).await;
    const CHANGES: u16 = 20;
    for revision in 1..=CHANGES {
        rig.reset(large(revision)).await;
        let published = || async {
            let pools = rig.shared.pools.views.borrow().clone();
            let pool = pools.get("default").unwrap();
            pool.members[0].instance.labels[0].1 == revision.to_string()
        };
        until("published", published).await;
    }
    let mut pool_updates = 0;
    loop {
        let pool_update = filter.pool_update().await;
        pool_updates += 1;
        if pool_update.endpoints[0]
            .labels
            .iter()
            .any(|l| l.value == CHANGES.to_string())
        {
            break;
        }
    }
    assert!(
        pool_updates <= 4,
        "{pool_updates} pool updates of 2 MB queued for a reader that was not reading"
    );
}

#[tokio::test]
async fn a_full_pool_fits_a_message() {
    let label = |i: usize| {
        (0..discovery::LABELS_MAX).map(move |j| {
            (
                format!("{i:04}{j:04}"),
                "x".repeat(discovery::LABEL_BYTES_MAX / discovery::LABELS_MAX - 8),
            )
        })
    };
    let full = (0..discovery::INSTANCES_MAX)
        .map(|i| discovery::Instance {
            name: format!("{i:0width$}", width = discovery::NAME_BYTES_MAX),
            labels: label(i).collect(),
            ..instance("", u16::try_from(i + 1).unwrap())
        })
        .collect::<Vec<_>>();
    discovery::validate(&full).unwrap();
    let rig = DaemonHarness::start(full).await;
    let (mut filter, _) = FilterStream::connect(rig.address, "n", 1, &["default"]).await;
    let pool_update = filter.pool_update().await;
    assert_eq!(pool_update.endpoints.len(), discovery::INSTANCES_MAX);
    assert!(
        pool_update.encoded_len() < proto::MESSAGE_BYTES_MAX * 9 / 10,
        "{} bytes",
        pool_update.encoded_len()
    );
}

#[tokio::test]
async fn many_proxies_all_get_every_change() {
    const PROXIES: u64 = 100;
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let mut filters = Vec::new();
    for process_id in 0..PROXIES {
        filters.push(
            FilterStream::connect(
                rig.address,
                &format!("n{process_id}"),
                process_id,
                &["default"],
            )
            .await
            .0,
        );
    }
    for filter in &mut filters {
        filter.pool_update().await;
    }
    rig.reset(vec![instance("b", 2)]).await;
    for filter in &mut filters {
        while names(&filter.pool_update().await) != ["b"] {}
    }
    assert_eq!(
        rig.shared.proxies.streams.borrow().len(),
        usize::try_from(PROXIES).unwrap()
    );
    drop(filters);
    until("rows of closed streams are gone", || async {
        rig.shared.proxies.streams.borrow().is_empty()
    })
    .await;
}

#[tokio::test]
async fn reports_add_up_over_vms_and_survive_nonsense() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let (mut filter, _) = FilterStream::connect(rig.address, "n", 1, &["default"]).await;
    let id = first_id(&filter.pool_update().await);
    let counters = |vm_id, picked, requests| {
        let row = state::EndpointCounters {
            slot: u32::from(id.slot.0),
            generation: id.generation.0,
            picked,
            requests,
            ..Default::default()
        };
        state::VmCounters {
            pool: "default".to_owned(),
            vm_id,
            endpoints: vec![row],
            ..Default::default()
        }
        .encode_to_vec()
    };
    let report = |counters| proxy_message::Message::Report(state::Report { counters });
    filter
        .say(report(vec![
            counters(1, 10, 1),
            counters(2, 5, 2),
            vec![0xff; 9],
        ]))
        .await;
    filter.say(report(vec![counters(1, 12, 3)])).await;
    let total = || async {
        let totals = rig
            .shared
            .reports
            .totals("default", tokio::time::Instant::now());
        totals
            .endpoints
            .get(&(id.generation, id.slot))
            .is_some_and(|e| (e.picked, e.requests) == (17, 5))
    };
    until("cumulative counts replace, VMs add", total).await;
    assert_eq!(rig.shared.reports.counters().reports_invalid, 1);
    let later = tokio::time::Instant::now() + Duration::from_secs(60);
    let totals = rig.shared.reports.totals("default", later);
    let row = totals.endpoints[&(id.generation, id.slot)];
    assert_eq!(
        (row.picked, row.requests, totals.vms),
        (17, 0, 0),
        "a silent VM's counts stay, and its outstanding requests do not"
    );
}

#[tokio::test]
async fn an_empty_pool_is_sent_as_empty() {
    let rig = DaemonHarness::start(vec![]).await;
    let (mut filter, _) = FilterStream::connect(rig.address, "n", 1, &["default"]).await;
    assert!(filter.pool_update().await.endpoints.is_empty());
    let message = filter.next().await.unwrap();
    assert!(matches!(message, Message::Metrics(m) if queue_depths(&m).is_empty()));
}

#[tokio::test]
async fn what_others_tell_too_soon_is_passed_on_as_soon_as_it_is_due() {
    // The number of rounds that prove something. On a busy machine most rounds end before the
    // daemon could be too early.
    const ROUNDS: u32 = 8;
    const TRIES_MAX: u32 = 1_000;
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let (mut one, _) = FilterStream::connect(rig.address, "one", 1, &["default"]).await;
    let (mut two, _) = FilterStream::connect(rig.address, "two", 2, &["default"]).await;
    let pool_update = one.pool_update().await;
    two.pool_update().await;
    let share = || {
        proxy_message::Message::LoadReport(state::LoadReport {
            pool: "default".to_owned(),
            ..state::LoadReport::default()
        })
    };
    // `late` counts rounds in which the share arrived only after a heartbeat.
    let mut rounds = 0;
    let mut late = 0;
    for _ in 0..TRIES_MAX {
        two.say(share()).await;
        while !matches!(one.next().await.unwrap(), Message::PeerLoad(_)) {}
        let shared_at = std::time::Instant::now();
        two.say(share()).await;
        tokio::time::sleep(SHARE_INTERVAL / 4).await;
        // One message wakes the daemon during this time. After this one message, no proxy sends
        // anything.
        one.ack(&pool_update, "").await;
        let early = shared_at.elapsed() < SHARE_INTERVAL / 2;
        let waited = !matches!(one.next().await.unwrap(), Message::PeerLoad(_));
        rounds += u32::from(early);
        late += u32::from(early && waited);
        if rounds == ROUNDS {
            break;
        }
        tokio::time::sleep(2 * SHARE_INTERVAL).await;
    }
    assert_eq!(rounds, ROUNDS, "the machine was too busy for a result");
    assert!(late < ROUNDS / 4, "it waited for a heartbeat {late} times");
}
