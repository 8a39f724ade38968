//! The number of VMs of each owner and each origin, and the memory that their counts use.

use std::collections::BTreeMap;

use crate::state::peer::Origin;

/// The maximum number of VMs counted one by one: the workers of a few hundred proxies. A VM
/// typically takes about 10 KB.
pub const VMS_MAX: usize = 4096;

/// The maximum number of VMs of one origin counted one by one: the workers of the largest hosts, in
/// several pools.
pub(super) const VMS_PER_ORIGIN_MAX: usize = VMS_MAX / 8;

/// The maximum memory of VMs counted one by one, in bytes (approximate): 4,096 VMs in a pool of 300
/// endpoints.
pub const BYTES_MAX: usize = 128 << 20;

/// The maximum memory of the VMs of one origin, in bytes.
pub(super) const BYTES_PER_ORIGIN_MAX: usize = BYTES_MAX / 8;

/// The number of eighths of a limit down to which VMs are retired when the limit is exceeded, so
/// that retiring is rare.
pub(super) const LEFT_EIGHTHS: usize = 7;

/// The number of quarters of the limits for all VMs that the VMs of one owner may use while several
/// owners have VMs.
pub(super) const OWNER_QUARTERS: usize = 3;

/// The number and the memory of VMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct VmUsage {
    pub(super) vms: usize,
    pub(super) bytes: usize,
}

/// The usage by the VMs of each owner and each origin, and by all VMs.
#[derive(Debug, Default)]
pub(super) struct VmUsageByOrigin {
    pub(super) levels: [BTreeMap<Origin, VmUsage>; 2],
    pub(super) all: VmUsage,
}

// === impl VmUsageByOrigin ===

impl VmUsageByOrigin {
    pub(super) fn add(&mut self, origin: &Origin, bytes: usize) {
        for (rows, of) in self.levels.iter_mut().zip(origin.levels()) {
            rows.entry(of).or_default().add(bytes);
        }
        self.all.add(bytes);
    }

    pub(super) fn subtract(&mut self, origin: &Origin, bytes: usize) {
        for (rows, of) in self.levels.iter_mut().zip(origin.levels()) {
            if let Some(usage) = rows.get_mut(&of) {
                usage.subtract(bytes);
                if usage.vms == 0 {
                    rows.remove(&of);
                }
            }
        }
        self.all.subtract(bytes);
    }

    /// Returns the limit that the VMs of `origin`, or all VMs, exceed, and whose VMs those are: of
    /// an owner or an origin, as level and name, or all (`None`).
    pub(super) fn over(&self, origin: &Origin) -> Option<(Option<(usize, Origin)>, VmUsage)> {
        let [owners, _] = &self.levels;
        let all_max = VmUsage {
            vms: VMS_MAX,
            bytes: BYTES_MAX,
        };
        let origin_max = VmUsage {
            vms: VMS_PER_ORIGIN_MAX,
            bytes: BYTES_PER_ORIGIN_MAX,
        };
        let owner_max = match owners.len() {
            0 | 1 => all_max,
            _ => all_max.eighths(2 * OWNER_QUARTERS),
        };
        let levels = self.levels.iter().zip(origin.levels()).enumerate();
        let mut levels = levels.zip([owner_max, origin_max]);
        let over = levels.find_map(|((level, (rows, of)), max)| {
            let is_over = rows.get(&of).is_some_and(|usage| usage.is_over(max));
            is_over.then_some((Some((level, of)), max))
        });
        over.or_else(|| self.all.is_over(all_max).then_some((None, all_max)))
    }
}

// === impl VmUsage ===

impl VmUsage {
    pub(super) fn is_over(self, max: Self) -> bool {
        self.vms > max.vms || self.bytes > max.bytes
    }

    /// Returns the usage multiplied by `parts` / 8.
    pub(super) fn eighths(self, parts: usize) -> Self {
        Self {
            vms: self.vms * parts / 8,
            bytes: self.bytes * parts / 8,
        }
    }

    pub(super) fn add(&mut self, bytes: usize) {
        self.vms += 1;
        self.bytes += bytes;
    }

    pub(super) fn subtract(&mut self, bytes: usize) {
        self.vms -= 1;
        self.bytes -= bytes;
    }
}
