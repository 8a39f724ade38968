use proptest::prelude::*;

use super::*;

const MIDDLE: f64 = 0.5; // This value gives no jitter.

fn pace(outcomes: &[ScrapeOutcome], now: Instant) -> ScrapePace {
    let mut pace = ScrapePace::default();
    outcomes
        .iter()
        .for_each(|outcome| pace.record(*outcome, Duration::ZERO, now));
    pace
}

#[tokio::test(start_paused = true)]
async fn busy_endpoints_are_asked_often_until_a_while_after() {
    let now = Instant::now();
    let intervals = ScrapeIntervals::default();
    let pause = |pace: ScrapePace, at| pace.pause(intervals, 1, at, MIDDLE);
    assert_eq!(
        pause(pace(&[ScrapeOutcome::Idle], now), now),
        intervals.idle
    );
    let busy = pace(&[ScrapeOutcome::Busy, ScrapeOutcome::Idle], now);
    assert_eq!(pause(busy, now), intervals.busy);
    assert_eq!(pause(busy, now + BUSY_HOLD), intervals.idle);
}

#[tokio::test(start_paused = true)]
async fn failing_endpoints_are_asked_ever_more_seldom() {
    let now = Instant::now();
    let seconds = |failures| {
        pace(&vec![ScrapeOutcome::Failed; failures], now)
            .pause(ScrapeIntervals::default(), 1, now, MIDDLE)
            .as_secs()
    };
    assert_eq!(
        [
            seconds(1),
            seconds(2),
            seconds(3),
            seconds(4),
            seconds(1000)
        ],
        [1, 2, 4, 5, 5]
    );
    let away = pace(
        &[
            ScrapeOutcome::Failed,
            ScrapeOutcome::Failed,
            ScrapeOutcome::Away,
        ],
        now,
    );
    assert_eq!(
        away.pause(ScrapeIntervals::default(), 1, now, MIDDLE),
        ScrapeIntervals::default().idle,
        "a returning endpoint should be noticed soon"
    );
    let recovered = pace(
        &[
            ScrapeOutcome::Failed,
            ScrapeOutcome::Failed,
            ScrapeOutcome::Idle,
        ],
        now,
    );
    assert_eq!(
        recovered.pause(ScrapeIntervals::default(), 1, now, MIDDLE),
        ScrapeIntervals::default().idle
    );
}

#[tokio::test(start_paused = true)]
async fn endpoints_that_answer_slowly_are_asked_less_often_but_never_less_than_idle_ones() {
    let now = Instant::now();
    let pause_ms = |took_ms| {
        let mut pace = ScrapePace::default();
        pace.record(ScrapeOutcome::Busy, Duration::from_millis(took_ms), now);
        pace.pause(ScrapeIntervals::default(), 1, now, MIDDLE)
            .as_millis()
    };
    assert_eq!(
        [pause_ms(0), pause_ms(5), pause_ms(20), pause_ms(900)],
        [100, 100, 400, 1000]
    );
}

proptest! {
    #[test]
    fn never_more_scrapes_than_affordable(endpoints in 1usize..2000, chance in 0.0..1.0, busy in any::<bool>()) {
        let now = Instant::now();
        let outcome = if busy { ScrapeOutcome::Busy } else { ScrapeOutcome::Idle };
        let pause = pace(&[outcome], now).pause(ScrapeIntervals::default(), endpoints, now, chance);
        prop_assert!(endpoints as f64 / pause.as_secs_f64() <= SCRAPES_PER_SECOND_MAX / (1.0 - JITTER) * 1.001);
        prop_assert!(pause <= Duration::from_secs(6));
    }

    #[test]
    fn the_first_round_is_spread_but_within_the_interval(new in 1usize..5000, chance in 0.0..1.0) {
        let pause = first_pause(ScrapeIntervals::default(), new, chance);
        prop_assert!(pause <= ScrapeIntervals::default().idle);
        prop_assert!(new > 1 || pause == Duration::ZERO);
    }
}
