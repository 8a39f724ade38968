//! The cells: sessions and engines.

use crate::published::PublishedShape;
use crate::session::RaceSession;
use crate::workload::RaceWorkload;

/// One cell of the race.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cell {
    /// The name in commands, records and on the page.
    pub name: &'static str,
    pub source: CellSource,
    pub engines: CellEngines,
    pub change: CellChange,
    /// The number of router processes, which the sessions use in turn.
    pub gateways: usize,
}

/// The source of a cell's sessions, which also sets when they arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CellSource {
    /// Sessions of a workload that arrive at random.
    Random {
        workload: RaceWorkload,
        /// The rate of arrivals, in percent of the highest rate that round robin can serve with
        /// this workload.
        load_percent: u32,
    },
    /// Sessions like those of a published benchmark table.
    Published(PublishedShape),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CellEngines {
    pub count: usize,
    pub kind: CellEngine,
    pub speed: EngineSpeed,
    /// The maximum number of sequences that each engine runs at the same time.
    pub sequences_max: usize,
    /// The number of KV blocks of each engine, of 16 tokens each. With `None` an engine has as many
    /// blocks as its profile.
    pub kv_blocks: Option<u32>,
}

/// The engines of a cell: program, model and hardware.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CellEngine {
    /// Our model server (crate `testbed`), which simulates Qwen3 32B on an H200.
    Qwen32bH200,
    /// Our model server (crate `testbed`), which simulates Llama 3 8B on an A10. Each step takes
    /// three times as long as in the profile of an A100, because an A10 reads its memory at 600
    /// GB/s instead of 2,039 GB/s and has 125 Tflop/s instead of 312 Tflop/s.
    Llama8bA10,
    /// Dynamo's mocker, a simulated engine that we did not write. The mocker has its own speed, so
    /// no profile applies to it.
    DynamoMocker {
        /// The number of sessions of the cell's workload that round robin can serve each second
        /// with these engines.
        capacity_per_s: f64,
    },
}

/// The speeds of a cell's engines, relative to their profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineSpeed {
    /// All engines are as fast as the profile.
    Equal,
    /// The second half of the engines takes twice as long for each step.
    HalfAreHalfAsFast,
}

/// The changes of the pool during a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CellChange {
    /// The pool does not change.
    None,
    /// One engine dies after a quarter of the arrivals, one engine is added after half, and another
    /// engine restarts with an empty cache after three quarters.
    KillAddRestart,
}

impl CellEngines {
    /// Eight engines, which most judged cells have. The limit of 24 sequences is low, so that even
    /// a pool near its capacity sends no more events than two cores can handle.
    pub const EIGHT: Self = Self {
        count: 8,
        kind: CellEngine::Qwen32bH200,
        speed: EngineSpeed::Equal,
        sequences_max: 24,
        kv_blocks: None,
    };
    /// Eight engines with as many sequences as vLLM allows by default.
    const EIGHT_WIDE: Self = Self {
        sequences_max: 256,
        ..Self::EIGHT
    };
    /// Three A10s. The number of blocks is what fits into 24 GiB of memory beside the weights:
    /// about 2,400 blocks of 16 tokens, at 128 KiB per token.
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
        // The largest request takes 1,900 blocks, so an engine cannot have fewer. About 40 sessions
        // are live at the same time. With the system prompt that all sessions share, they take
        // 19,000 blocks. The system prompt takes 440 blocks in every engine. The engines have room
        // for two thirds of the blocks.
        Self::tight("agents-tight", RaceWorkload::Agents, 85, 2_200),
        Self::new("tenants-10", RaceWorkload::Tenants, 10),
        Self::new("tenants-50", RaceWorkload::Tenants, 50),
        Self::new("tenants-85", RaceWorkload::Tenants, 85),
        // About 110 sessions are live at the same time. With one copy of each of the 16 system
        // prompts, they take 10,700 blocks. The pool has room for all of these blocks. But beside
        // its sessions, an engine has room for only a third of the system prompts (330 blocks
        // each). With half as many blocks, not even the requests that run at the same time would
        // fit.
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

    /// The cells with the load of a published benchmark table.
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

    /// The cells with three of Dynamo's engines. The capacity of round robin was measured with
    /// Dynamo's own frontend in real time, with seed 1 and 60 to 90 s of arrivals. Of the tenants'
    /// requests, none waits at three sessions a second. At four sessions a second a request waits
    /// for 1.3 s, and five are more than the engines can serve. Of the agents' requests, none waits
    /// at 0.4 sessions a second, and 82 % of the prompts are hits. At 0.55 sessions a second the
    /// engines evict blocks, so only 77 % are hits, and a request takes a third longer.
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

    /// Returns all cells: the judged cells, then the published cells, then the cells with Dynamo's
    /// engines.
    pub fn all() -> impl Iterator<Item = Self> {
        Self::judged().chain(Self::PUBLISHED).chain(Self::DYNAMO)
    }

    /// Returns the cells that a full race plays with every seed. A full race plays the published
    /// cells and Dynamo's cells with only one seed.
    pub fn judged() -> impl Iterator<Item = Self> {
        Self::CORE.into_iter().chain([Self::TWO_GATEWAYS])
    }

    #[must_use]
    pub fn find(name: &str) -> Option<Self> {
        Self::all().find(|cell| cell.name == name)
    }

    /// Returns the cell's workload, or `None` if the cell has the load of a published table.
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

    /// Returns the number of sessions that arrive each second, or `None` if the router or a
    /// recording determines this number.
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

    /// Returns how many sessions of this workload round robin can serve each second with the cell's
    /// engines.
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

    /// Returns the sessions of a run, in order of arrival. If sessions arrive at random, returns
    /// those of the first `arrivals_s` seconds. Returns no sessions for a recording, because the
    /// crate `race` reads recordings from a file.
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
    /// Returns how many sessions a second round robin can serve with eight engines `qwen3-32b-h200`
    /// of at most 24 sequences. The number is the highest rate of arrivals at which the number of
    /// live sessions stops growing within ten minutes of virtual time, over five seeds. `simulator
    /// race capacity` finds this rate. Agents fill the caches before they fill the engines, so the
    /// capacity for agents is the rate at which round robin begins to evict the contexts of live
    /// sessions.
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
