//! Tests with two processes that share their load through a daemon.

use super::*;
use prost::Message as _;
use proto::state::{daemon_message, proxy_message};

/// Returns the load reports that the leader has sent to the daemon since the last check.
fn reports(world: &SharingWorld) -> Vec<state::LoadReport> {
    let sent = std::mem::take(&mut *world.host.grpc.sent.borrow_mut());
    let share = |(_, bytes): (u32, Vec<u8>)| match state::ProxyMessage::decode(bytes.as_slice())
        .unwrap()
        .message
    {
        Some(proxy_message::Message::LoadReport(share)) => Some(share),
        _ => None,
    };
    sent.into_iter().filter_map(share).collect()
}

fn say(world: &SharingWorld, peers: state::PeerLoad) {
    let bytes = crate::fake::encode(daemon_message::Message::PeerLoad(peers));
    let size = bytes.len();
    let stream = world.host.grpc.streams.borrow().len() as u32;
    world
        .host
        .http
        .buffers
        .borrow_mut()
        .insert(BodyBuffer::StreamMessage as u32, bytes);
    world.workers[0]
        .borrow_mut()
        .on_stream_message(1, stream, size);
}

fn others(proxies: u32) -> state::PeerLoad {
    state::PeerLoad {
        pool: "default".into(),
        proxies,
        ..state::PeerLoad::default()
    }
}

#[test]
fn nothing_is_told_while_there_is_nobody_to_tell() {
    let world = SharingWorld::new(3, "");
    let _stream = world.request(1, "x");
    world.tick();
    assert!(
        reports(&world).is_empty(),
        "the daemon has not said a word of others"
    );
    say(&world, others(1));
    world.tick();
    assert!(reports(&world).is_empty(), "there are none");
    say(&world, others(2));
    world.tick();
    assert_eq!(reports(&world).len(), 1);
}

#[test]
fn what_one_process_has_under_way_counts_at_every_worker_of_the_other() {
    let one = SharingWorld::new(3, "");
    let two = SharingWorld::new(3, "");
    say(&one, others(2));
    let prompt = "once upon a time ".repeat(100);
    let (mut first, _) = one.request(1, &prompt);
    let (mut second, _) = one.request(2, "y");
    one.host.pass_ms(ROWS_MS);
    one.tick();
    let [share] = &reports(&one)[..] else {
        panic!("one message")
    };
    let long = proto::placements::each_claim(&share.claims)
        .map(|(_, _, blocks)| blocks)
        .max_by_key(Vec::len)
        .unwrap();
    let peers = state::PeerLoad {
        row: share.row.clone(),
        claims: share.claims.clone(),
        ..others(2)
    };
    say(&two, peers.clone());
    two.host.pass_ms(RINGS_AT_PICK_MS);
    for worker in 0..3 {
        assert_eq!(two.look(worker).requests, 2, "worker {worker}");
    }
    assert!(long.len() > 5);
    assert_eq!(two.matched(1, &long), long.len() as u32);
    // A proxy does not publish the load that it received, only its own load.
    two.tick();
    assert!(
        reports(&two)
            .iter()
            .all(|share| share.row.len() == LoadReportHead::BYTES
                && share.placements.is_empty()
                && share.claims.is_empty()),
        "{:?}",
        reports(&two)
    );

    two.host.pass_ms(proto::SHARE_EXPIRY_MS);
    assert_eq!(two.look(1).requests, 0, "the report was not sent again");
    say(&two, peers);
    two.host.pass_ms(SLOW_ROWS_MS);
    assert_eq!(two.look(1).requests, 2);
    first.on_done();
    second.on_done();
    one.tick();
    one.tick();
    let last = reports(&one).pop().unwrap();
    assert_eq!(last.row.len(), LoadReportHead::BYTES, "all has ended");
    say(
        &two,
        state::PeerLoad {
            row: last.row,
            ..others(2)
        },
    );
    two.host.pass_ms(SLOW_ROWS_MS);
    assert_eq!(two.look(1).requests, 0);
}

#[test]
fn the_one_that_leaders_ticks_faster_while_there_is_something_to_tell() {
    let world = SharingWorld::new(2, "");
    say(&world, others(2));
    world.host.take_log();
    let (mut stream, _) = world.request(1, "x");
    world.host.pass_ms(ROWS_MS);
    world.tick();
    assert!(
        world
            .host
            .take_log()
            .contains(&"tick every 5 ms".to_owned())
    );
    reports(&world);
    stream.on_done();
    world.host.pass_ms(5);
    world.workers[0].borrow_mut().tick(1);
    assert_eq!(reports(&world).len(), 1, "between two whole ticks");
    world.host.pass_ms(2_000);
    world.tick();
    assert!(
        world
            .host
            .take_log()
            .contains(&"tick every 10 ms".to_owned())
    );
    say(&world, others(1));
    world.tick();
    assert!(
        world
            .host
            .take_log()
            .contains(&"tick every 100 ms".to_owned())
    );
}

#[test]
fn a_failure_at_one_process_is_known_to_every_worker_of_the_other_and_not_told_back() {
    let one = SharingWorld::new(3, "");
    let two = SharingWorld::new(3, "");
    // The clock of the second process differs from the clock of the first process.
    (0..10).for_each(|_| two.tick());
    say(&one, others(2));
    say(&two, others(2));
    let (mut stream, list) = one.request(1, "x");
    one.respond(&mut stream, "via_upstream", &list[1], 2);
    stream.on_done();
    one.host.pass_ms(ROWS_MS);
    one.tick();
    let share = reports(&one).pop().unwrap();
    assert!(
        share.row.len() > LoadReportHead::BYTES,
        "the ejection is published"
    );
    say(
        &two,
        state::PeerLoad {
            row: share.row,
            ..others(2)
        },
    );
    two.host.pass_ms(RINGS_AT_PICK_MS);
    for worker in 0..3 {
        let (mut stream, others) = two.request(worker, "z");
        stream.on_done();
        assert!(!others.contains(&list[0]), "worker {worker}: {others:?}");
    }
    two.tick();
    two.tick();
    assert!(
        reports(&two)
            .iter()
            .all(|share| share.row.len() == LoadReportHead::BYTES),
        "a received report is not published again"
    );
    two.host.pass_ms(1_000);
    assert!(
        two.request(1, "z").1.contains(&list[0]),
        "it counts as long as at its own proxy, and no longer"
    );
}

#[test]
fn a_leader_that_serves_tells_its_own_placements() {
    let world = SharingWorld::new(2, "");
    say(&world, others(2));
    let prompt = "once upon a time ".repeat(100);
    let _stream = world.request(0, &prompt);
    world.tick();
    let placements: usize = reports(&world)
        .iter()
        .map(|share| proto::placements::each_claim(&share.claims).count())
        .sum();
    assert_eq!(placements, 1, "claimed until a reply confirms it");
}

#[test]
fn own_picks_weigh_once_for_each_active_proxy_while_the_others_cannot_know_of_them() {
    let world = SharingWorld::new(3, "");
    say(&world, others(4));
    world.tick();
    let (mut first, _) = world.request(1, "x");
    world.host.pass_ms(ROWS_MS);
    world.tick();
    let stamp = reports(&world).pop().unwrap().stamp;
    // The report arrives after a delay in both directions.
    let peers = state::PeerLoad {
        row: vec![0; LoadReportHead::BYTES],
        stamp,
        active: 3,
        ..others(4)
    };
    say(&world, peers.clone());
    first.on_done();
    world.host.pass_ms(300);
    say(&world, peers);
    world.host.pass_ms(SLOW_ROWS_MS);
    (1..3).for_each(|worker| assert_eq!(world.look(worker).requests, 0));
    let _pick = world.request(1, "y");
    assert_eq!(
        world.known(1).requests,
        4,
        "one own request, and one for each of three other proxies"
    );
    world.host.pass_ms(ROWS_MS);
    assert_eq!(
        world.look(2).requests,
        4,
        "a request of another worker counts as an own request too"
    );
    world.host.pass_ms(proto::SHARE_EXPIRY_MS);
    (1..3).for_each(|worker| {
        assert!(
            world.look(worker).requests <= 1,
            "newer reports of the other proxies have come"
        );
    });
}

#[test]
fn a_row_that_stands_is_told_again_before_it_expires() {
    let world = SharingWorld::new(2, "");
    say(&world, others(2));
    let _stream = world.request(1, "x");
    let mut times = Vec::new();
    for ms in 0..2_000 / TICK_MS {
        world.tick();
        times.extend(reports(&world).iter().map(|_| ms * TICK_MS));
    }
    assert!((4..8).contains(&times.len()), "{times:?}");
}

#[test]
fn any_row_from_outside_is_survived() {
    let world = SharingWorld::new(2, "");
    for row in [vec![], vec![1], vec![0xff; 16], vec![0xff; 400]] {
        say(
            &world,
            state::PeerLoad {
                placements: row.clone(),
                row,
                ..others(9)
            },
        );
        world.host.pass_ms(ROWS_MS);
        assert_eq!(world.look(1).requests, 0);
        world.tick();
    }
}

/// Delivers the daemon's heartbeat.
fn heartbeat(world: &SharingWorld, sequence: u64) {
    let version = Version {
        term: 1,
        sequence: 1,
    };
    let store = crate::shared_data::snapshot_store::SharedSnapshotStore::new("default");
    let metrics = crate::fake::metrics_message("default", version, sequence, &[0.0; 3]);
    store
        .publish_metrics(
            &world.host,
            9,
            (version, sequence),
            &metrics,
            world.host.now(),
        )
        .unwrap();
    world.tick();
}

#[test]
fn proxies_that_cannot_hear_each_other_agree_on_cold_prompts() {
    let worlds = [SharingWorld::new(3, ""), SharingWorld::new(3, "")];
    for world in &worlds {
        heartbeat(world, 2);
        say(
            world,
            state::PeerLoad {
                row: vec![0; LoadReportHead::BYTES],
                ..others(2)
            },
        );
    }
    // Make the random numbers of the two processes differ.
    for i in 0..7 {
        worlds[1].request(1, &format!("{i}")).0.on_done();
    }
    let homes = |round: u32| {
        let home = |world: &SharingWorld, i: u32| {
            world.host.pass_ms(ROWS_MS);
            let (mut stream, list) =
                world.request(1, &format!("{round} {i} {}", "a cold prompt ".repeat(100)));
            stream.on_done();
            list[0].clone()
        };
        (0..20)
            .filter(|i| home(&worlds[0], *i) == home(&worlds[1], *i))
            .count()
    };
    assert!(
        homes(0) < 18,
        "while reports arrive, chance decides between equal endpoints"
    );
    worlds
        .iter()
        .for_each(|world| world.host.pass_ms(proto::SHARE_EXPIRY_MS));
    assert_eq!(homes(1), 20);
    for world in &worlds {
        heartbeat(world, 3);
        say(
            world,
            state::PeerLoad {
                row: vec![0; LoadReportHead::BYTES],
                ..others(1)
            },
        );
        world.host.pass_ms(proto::SHARE_EXPIRY_MS);
    }
    assert!(
        homes(2) < 18,
        "the other proxy is gone, so there is no need to agree"
    );
}
