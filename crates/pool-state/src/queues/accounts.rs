//! Keeps the accounts of bands and flows, which record their charges, in the order that all VMs
//! share.

use scheduler::Timestamp;
use scheduler::flow::{BandService, FlowAccount, FlowControl, SharedOrder};

use super::FlowQueues;

// === impl FlowQueues ===

impl FlowQueues {
    /// Takes over from the order the accounts and the requests that the other VMs hold. Adds the
    /// charges that this VM made without a claim.
    pub(crate) fn read_order(
        &mut self,
        control: &FlowControl,
        order: &SharedOrder,
        vm: u64,
        now: Timestamp,
    ) {
        self.shared.read(order, vm, now);
        for band in &mut self.bands {
            let service = order
                .bands
                .iter()
                .find(|service| service.priority == band.priority);
            let Some((service, rules)) = service.zip(control.band(band.priority)) else {
                continue;
            };
            let before = std::mem::replace(&mut band.account, service.account);
            band.credit = service.credit;
            for flow in band.flows_mut() {
                let known = service.flow(flow.id);
                if std::mem::take(&mut flow.passed) {
                    // Virtual times of VMs that shared nothing cannot be compared, but the flow's
                    // lead over its band can.
                    flow.joins_at = Some(
                        service.account.virtual_time
                            + (flow.account.start - before.virtual_time).max(0.0),
                    );
                }
                let mut account = known.unwrap_or(service.idle_flow());
                rules.fairness.settle(&mut account, flow.settled);
                if let Some(start) = flow.joins_at {
                    account.start = account.start.max(start);
                    account.attained = account.attained.max(flow.account.attained);
                    account.attained_at = account.attained_at.max(flow.account.attained_at);
                }
                flow.account = account;
            }
        }
    }

    /// Writes the accounts into the order, and their effects into the rows of the other VMs.
    pub(super) fn write_accounts(
        &self,
        control: &FlowControl,
        order: &mut SharedOrder,
        vm: u64,
        now: Timestamp,
    ) {
        for band in self.bands.iter().filter(|band| !band.flows().is_empty()) {
            let at = order
                .bands
                .iter()
                .position(|service| service.priority == band.priority)
                .unwrap_or_else(|| {
                    order.bands.push(BandService {
                        priority: band.priority,
                        ..BandService::default()
                    });
                    order.bands.len() - 1
                });
            let SharedOrder { rows, bands, .. } = order;
            let rules = control.band(band.priority);
            let Some((service, rules)) = bands.get_mut(at).zip(rules) else {
                continue;
            };
            let rank =
                |account: &FlowAccount| rules.fairness.rank(account, &band.account, 0.0, now);
            for flow in band.flows() {
                let known = service.flow(flow.id);
                let idle = service.idle_flow();
                if known.is_none() && flow.queued.is_empty() && flow.account == idle {
                    continue;
                }
                let before = rank(&known.unwrap_or(idle));
                let after = rank(&flow.account);
                if before != after {
                    let others = rows.iter_mut().filter(|row| row.vm != vm);
                    others.for_each(|row| row.change_rank(band.priority, flow.id, before, after));
                }
                service.set_flow(flow.id, flow.account);
            }
            service.account = band.account;
            service.credit = band.credit;
            service.trim();
        }
    }
}
