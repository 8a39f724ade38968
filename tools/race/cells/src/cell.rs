//! The cells: sessions and engines.

use crate::published::PublishedShape;
use crate::session::RaceSession;
use crate::workload::RaceWorkload;

/// One cell of the race.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cell {
    /// The name in commands, records and on the page.
    pub name: &'static str,
    /// Where its sessions come from.
    pub source: CellSource,
    pub engines: CellEngines,
    /// What happens to the pool during the run.
    pub change: CellChange,
    /// The number of router processes. Sessions use them in turn.
    pub gateways: usize,
}

/// Where the sessions of a cell come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CellSource {
    /// Sessions of a workload that arrive at random.
    Random {
        workload: RaceWorkload,
        /// The load as a share of the rate of this workload that round robin can serve, percent.
        load_percent: u32,
    },
    /// The shape of a published table.
    Published(PublishedShape),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CellEngines {
    /// The number of engines.
    pub count: usize,
    pub kind: CellEngine,
    /// How fast the engines are.
    pub speed: EngineSpeed,
    /// The maximum number of sequences that each engine runs at once.
    pub sequences_max: usize,
    /// The KV blocks of each engine, of 16 tokens. `None`: as many as in the profile.
    pub kv_blocks: Option<u32>,
}

/// The engines of a cell: program, model and hardware.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CellEngine {
    /// Our model server, as Qwen3 32B on an H200.
    Qwen32bH200,
    /// Our model server, as Llama 3 8B on an A10. The profile is an A100 that takes three times as
    /// long, because an A10 reads its memory at 600 GB/s instead of 2,039 and has 125 Tflop/s
    /// instead of 312.
    Llama8bA10,
    /// Dynamo's mocker, an engine that we did not write. The mocker has its own speed, and not that
    /// of a profile.
    DynamoMocker {
        /// Sessions of the cell's workload that round robin can serve each second with these
        /// engines.
        capacity_per_s: f64,
    },
}

/// How fast the engines of a cell are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineSpeed {
    /// All engines are as fast as the profile.
    Equal,
    /// The second half of the engines takes twice as long for each step.
    HalfAreHalfAsFast,
}

/// What happens to the pool during a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CellChange {
    /// Nothing.
    None,
    /// One engine dies after a quarter of the arrivals, one engine is added after half, and another
    /// engine restarts with an empty cache after three quarters.
    KillAddRestart,
}

impl CellEngines {
    /// The engines of the judged cells. There are few sequences, so that a pool near its limits
    /// sends few enough events for two cores.
    pub const EIGHT: Self = Self {
        count: 8,
        kind: CellEngine::Qwen32bH200,
        speed: EngineSpeed::Equal,
        sequences_max: 24,
        kv_blocks: None,
    };
    /// As many sequences as vLLM allows by default.
    const EIGHT_WIDE: Self = Self {
        sequences_max: 256,
        ..Self::EIGHT
    };
    /// 24 GiB minus the weights are some 2,400 blocks at 128 KiB per token.
    const THREE_A10: Self = Self {
        count: 3,
        kind: CellEngine::Llama8bA10,
        speed: EngineSpeed::Equal,
        sequences_max: 32,
        kv_blocks: Some(2_400),
    };
}

// === impl Cell ===

impl Cell {
    pub const CORE: [Self; 12] = [
        Self::new("agents-50", RaceWorkload::Agents, 50),
        Self::new("agents-85", RaceWorkload::Agents, 85),
        // The largest request takes 1,900 blocks, so an engine cannot have fewer. Some 40 sessions
        // are live. Together with the prompt that all share, they take 19,000 blocks. The shared
        // prompt takes 440 of these in every engine. Two thirds of the blocks fit.
        Self::tight("agents-tight", RaceWorkload::Agents, 85, 2_200),
        Self::new("tenants-10", RaceWorkload::Tenants, 10),
        Self::new("tenants-50", RaceWorkload::Tenants, 50),
        Self::new("tenants-85", RaceWorkload::Tenants, 85),
        // Some 110 sessions are live. With each of the 16 prompts once, they take 10,700 blocks.
        // All of these fit once, but beside its sessions an engine holds only a third of the
        // prompts (330 blocks each). With half as many blocks, not even the requests that run at
        // the same time fit.
        Self::tight("tenants-tight", RaceWorkload::Tenants, 50, 2_000),
        Self::new("chat-50", RaceWorkload::Chat, 50),
        Self::new("documents-50", RaceWorkload::Documents, 50),
        Self::new("batch-85", RaceWorkload::BatchBesideChat, 85),
        Self {
            engines: CellEngines {
                speed: EngineSpeed::HalfAreHalfAsFast,
                ..CellEngines::EIGHT
            },
            ..Self::new("unequal", RaceWorkload::Agents, 50)
        },
        Self {
            change: CellChange::KillAddRestart,
            ..Self::new("change", RaceWorkload::Tenants, 50)
        },
    ];

    /// Two gateways in front of the engines of `agents-50`.
    pub const TWO_GATEWAYS: Self = Self {
        gateways: 2,
        ..Self::new("two-gateways", RaceWorkload::Agents, 50)
    };

    /// Cells in the shape of published tables.
    pub const PUBLISHED: [Self; 7] = [
        Self::published(
            "llm-d-groups-4",
            PublishedShape::SharedGroups { per_s: 4 },
            CellEngines::EIGHT_WIDE,
        ),
        Self::published(
            "llm-d-groups-24",
            PublishedShape::SharedGroups { per_s: 24 },
            CellEngines::EIGHT_WIDE,
        ),
        Self::published(
            "llm-d-groups-48",
            PublishedShape::SharedGroups { per_s: 48 },
            CellEngines::EIGHT_WIDE,
        ),
        Self::published(
            "llm-d-groups-96",
            PublishedShape::SharedGroups { per_s: 96 },
            CellEngines::EIGHT_WIDE,
        ),
        Self::published(
            "llm-d-unique-24",
            PublishedShape::UniquePrompts { per_s: 24 },
            CellEngines::EIGHT_WIDE,
        ),
        Self::published("higress", PublishedShape::TenTurns, CellEngines::THREE_A10),
        Self::published(
            "mooncake",
            PublishedShape::Recorded,
            CellEngines::EIGHT_WIDE,
        ),
    ];

    const fn published(name: &'static str, shape: PublishedShape, engines: CellEngines) -> Self {
        Self {
            name,
            source: CellSource::Published(shape),
            engines,
            change: CellChange::None,
            gateways: 1,
        }
    }

    /// Cells with three of Dynamo's engines. The capacity of round robin was measured with Dynamo's
    /// own frontend in real time, with seed 1 and 60 to 90 s of arrivals. Tenants: at three
    /// sessions a second no request waits, at four a request waits for 1.3 s, and five are more
    /// than the engines can serve. Agents: at 0.4 sessions a second no request waits and 82 % of
    /// the prompts are hits. At 0.55 engines evict, so only 77 % are hits, and a request takes a
    /// third longer.
    pub const DYNAMO: [Self; 2] = [
        Self::dynamo("dynamo-agents", RaceWorkload::Agents, 0.4),
        Self::dynamo("dynamo-tenants", RaceWorkload::Tenants, 3.6),
    ];

    const fn new(name: &'static str, workload: RaceWorkload, load_percent: u32) -> Self {
        let source = CellSource::Random {
            workload,
            load_percent,
        };
        Self {
            name,
            source,
            engines: CellEngines::EIGHT,
            change: CellChange::None,
            gateways: 1,
        }
    }

    const fn tight(
        name: &'static str,
        workload: RaceWorkload,
        load_percent: u32,
        kv_blocks: u32,
    ) -> Self {
        Self {
            engines: CellEngines {
                kv_blocks: Some(kv_blocks),
                ..CellEngines::EIGHT
            },
            ..Self::new(name, workload, load_percent)
        }
    }

    const fn dynamo(name: &'static str, workload: RaceWorkload, capacity_per_s: f64) -> Self {
        let engines = CellEngines {
            count: 3,
            kind: CellEngine::DynamoMocker { capacity_per_s },
            ..CellEngines::EIGHT
        };
        Self {
            engines,
            ..Self::new(name, workload, 50)
        }
    }

    /// All cells, in order.
    pub fn all() -> impl Iterator<Item = Self> {
        Self::judged().chain(Self::PUBLISHED).chain(Self::DYNAMO)
    }

    /// The cells that a full race plays with every seed. It plays the published cells and Dynamo's
    /// with one seed.
    pub fn judged() -> impl Iterator<Item = Self> {
        Self::CORE.into_iter().chain([Self::TWO_GATEWAYS])
    }

    #[must_use]
    pub fn find(name: &str) -> Option<Self> {
        Self::all().find(|cell| cell.name == name)
    }

    /// The workload of sessions that arrive at random.
    #[must_use]
    pub const fn workload(&self) -> Option<RaceWorkload> {
        match self.source {
            CellSource::Random { workload, .. } => Some(workload),
            CellSource::Published(_) => None,
        }
    }

    /// Whether the cell's engines are Dynamo's.
    #[must_use]
    pub const fn is_dynamo(&self) -> bool {
        matches!(self.engines.kind, CellEngine::DynamoMocker { .. })
    }

    /// Sessions that arrive each second; `None` if the number depends on the router or a recording.
    #[must_use]
    pub fn sessions_per_s(&self) -> Option<f64> {
        match self.source {
            CellSource::Random {
                workload,
                load_percent,
            } => Some(self.capacity_per_s(workload) * f64::from(load_percent) / 100.0),
            CellSource::Published(shape) => shape.per_s().map(f64::from),
        }
    }

    /// Sessions of this workload that round robin can serve each second.
    fn capacity_per_s(&self, workload: RaceWorkload) -> f64 {
        if let CellEngine::DynamoMocker { capacity_per_s } = self.engines.kind {
            return capacity_per_s;
        }
        let slow = if self.engines.speed == EngineSpeed::HalfAreHalfAsFast {
            0.75
        } else {
            1.0
        };
        workload.capacity_per_s() * slow * self.engines.count as f64
            / CellEngines::EIGHT.count as f64
    }

    /// The sessions of a run, in order of arrival. If they arrive at random, those of the first
    /// `arrivals_s` seconds. For a recording the list is empty, because recordings are read from a
    /// file.
    #[must_use]
    pub fn sessions(&self, seed: u64, arrivals_s: f64) -> Vec<RaceSession> {
        match self.source {
            CellSource::Random { workload, .. } => {
                workload.sessions(seed, self.sessions_per_s().unwrap_or_default(), arrivals_s)
            }
            CellSource::Published(shape) => shape.sessions(seed),
        }
    }
}

impl RaceWorkload {
    /// Sessions a second that round robin can serve with eight engines `qwen3-32b-h200` of at most
    /// 24 sequences. The number is the highest rate of arrivals at which the number of live
    /// sessions stops growing within ten minutes, in virtual time, over five seeds. `simulator race
    /// capacity` finds this rate. Agents fill the caches before they fill the engines, so their
    /// capacity is where round robin begins to evict the contexts of live sessions.
    #[must_use]
    pub const fn capacity_per_s(self) -> f64 {
        match self {
            Self::Agents => 0.69,
            Self::Tenants => 10.7,
            Self::Chat => 5.5,
            Self::Documents => 6.1,
            Self::BatchBesideChat => 9.5,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_is_found_by_its_name_and_no_name_is_used_twice() {
        for cell in Cell::all() {
            assert_eq!(Cell::find(cell.name), Some(cell));
        }
        assert_eq!(Cell::find("no cell"), None);
    }

    #[test]
    fn a_load_is_a_share_of_what_the_engines_of_the_cell_serve() {
        let cell = Cell::dynamo("x", RaceWorkload::Agents, 3.0);
        assert_eq!(cell.sessions_per_s(), Some(1.5));
    }

    #[test]
    fn a_pool_of_slower_engines_gets_less_load() {
        let [equal, unequal] = ["agents-50", "unequal"].map(|name| {
            Cell::find(name)
                .and_then(|cell| cell.sessions_per_s())
                .unwrap_or(0.0)
        });
        assert!((unequal / equal - 0.75).abs() < 1e-9);
    }
}
