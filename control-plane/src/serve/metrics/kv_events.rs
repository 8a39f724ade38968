//! Metrics of the KV events that engines publish.

use std::fmt;

use super::MetricsCollector;
use super::page::{MetricsPage, Rows, by, flag, float};
use crate::kv_events::batch::CacheMedium;
use crate::kv_events::{KvEventRow, PublisherLink};

// === impl MetricsCollector ===

impl MetricsCollector {
    pub(super) fn kv_events(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let pools = self.rows(Some);
        let rows: Rows<&KvEventRow> = by(&pools, "endpoint_name", |pool| {
            pool.kv_events.values().map(|row| (&*row.name, row))
        });
        let lags = rows
            .iter()
            .filter_map(|(labels, row)| Some((labels.clone(), row.lag_seconds?)));
        page.gauge(
            "switchpoint_kv_events_lag_seconds",
            "Time from an engine's last message to its arrival, by two clocks.",
            lags,
        )?;
        page.gauge(
            "switchpoint_kv_events_blocks",
            "Blocks that an engine has cached, by medium.",
            by(&rows, "medium", |row| {
                CacheMedium::NAMES.into_iter().zip(row.blocks.map(float))
            }),
        )?;
        page.gauges(
            &rows,
            [(
                "switchpoint_kv_events_connected",
                "0 while an engine's publisher cannot be reached.",
                |row| flag(row.link == PublisherLink::Connected),
            )],
        )?;
        kv_event_counters(page, &rows)
    }
}

fn kv_event_counters(page: &mut MetricsPage<'_>, rows: &Rows<&KvEventRow>) -> fmt::Result {
    page.counter(
        "switchpoint_kv_events_messages",
        "Messages of an engine, by result.",
        by(rows, "result", |row| {
            [
                ("live", row.counts.messages),
                ("replayed", row.counts.replayed),
                ("lost", row.counts.lost),
                ("invalid", row.counts.invalid),
            ]
        }),
    )?;
    page.counter(
        "switchpoint_kv_events_emptied",
        "Empty caches that events showed, by cause.",
        by(rows, "cause", |row| {
            [
                ("restart", row.counts.restarts),
                ("clear", row.counts.clears),
            ]
        }),
    )?;
    page.counter(
        "switchpoint_kv_events_unmatched",
        "Removed blocks that no event stored, and events of unknown type.",
        by(rows, "kind", |row| {
            [
                ("block", row.counts.unmatched_blocks),
                ("event", row.counts.unknown_events),
            ]
        }),
    )?;
    page.counters(
        rows,
        [
            (
                "switchpoint_kv_events_bytes",
                "Bytes of an engine's messages.",
                |row| row.counts.bytes,
            ),
            (
                "switchpoint_kv_events_gaps",
                "Gaps between an engine's messages.",
                |row| row.counts.gaps,
            ),
        ],
    )
}
