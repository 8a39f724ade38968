//! The cells: workload, load and engines.

use crate::session::RaceSession;
use crate::workload::RaceWorkload;

/// One cell of the race.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cell {
    /// The name in commands, records and on the page.
    pub name: &'static str,
    /// The sessions and their texts.
    pub workload: RaceWorkload,
    /// Load as a share of what round robin can serve of this workload, percent.
    pub load_percent: u32,
    /// The engines.
    pub engines: CellEngines,
    /// What happens to the pool during the run.
    pub change: CellChange,
    /// Processes of the router: sessions take them in turn.
    pub gateways: usize,
}

/// The engines of a cell.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CellEngines {
    /// How many there are.
    pub count: usize,
    /// Which program they are.
    pub kind: EngineProgram,
    /// How fast they are.
    pub speed: EngineSpeed,
    /// KV blocks of 16 tokens of each; `None`: those of the profile.
    pub kv_blocks: Option<u32>,
}

/// Which program the engines of a cell are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EngineProgram {
    /// Our own model server.
    ModelServer,
    /// Dynamo's mocker, an engine that we did not write. It has a speed of its own.
    DynamoMocker {
        /// Sessions a second that round robin can serve of the cell's workload with its engines.
        capacity_per_s: f64,
    },
}

/// How fast the engines of a cell are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineSpeed {
    /// All as fast as the profile.
    Equal,
    /// The second half of them takes twice as long for each step.
    HalfAreHalfAsFast,
}

/// What happens to the pool during a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CellChange {
    /// Nothing.
    None,
    /// After a quarter of the arrivals one engine dies; after a half one is added; after three
    /// quarters another restarts, empty.
    KillAddRestart,
}

impl CellEngines {
    const EIGHT: Self = Self { count: 8, kind: EngineProgram::ModelServer, speed: EngineSpeed::Equal, kv_blocks: None };
}

// === impl Cell ===

impl Cell {
    /// The core cells.
    pub const CORE: [Self; 12] = [
        Self::new("agents-50", RaceWorkload::Agents, 50),
        Self::new("agents-85", RaceWorkload::Agents, 85),
        // The largest request takes 1,900 blocks, so an engine cannot have fewer. Some 40 sessions
        // are live; with the prompt that all share they take 19,000 blocks, 440 of them in every
        // engine. Two thirds of them fit.
        Self::tight("agents-tight", RaceWorkload::Agents, 85, 2_200),
        Self::new("tenants-10", RaceWorkload::Tenants, 10),
        Self::new("tenants-50", RaceWorkload::Tenants, 50),
        Self::new("tenants-85", RaceWorkload::Tenants, 85),
        // Some 110 sessions are live, of 10,700 blocks with each of the 16 prompts once. All fit
        // once, but an engine holds only a third of the prompts (330 blocks each) beside its
        // sessions. With half as much, not even the requests that run at a time fit.
        Self::tight("tenants-tight", RaceWorkload::Tenants, 50, 2_000),
        Self::new("chat-50", RaceWorkload::Chat, 50),
        Self::new("documents-50", RaceWorkload::Documents, 50),
        Self::new("batch-85", RaceWorkload::BatchBesideChat, 85),
        Self {
            engines: CellEngines { speed: EngineSpeed::HalfAreHalfAsFast, ..CellEngines::EIGHT },
            ..Self::new("unequal", RaceWorkload::Agents, 50)
        },
        Self { change: CellChange::KillAddRestart, ..Self::new("change", RaceWorkload::Tenants, 50) },
    ];

    /// Two gateways in front of the engines of `agents-50`.
    pub const TWO_GATEWAYS: Self = Self { gateways: 2, ..Self::new("two-gateways", RaceWorkload::Agents, 50) };

    /// Cells with three of Dynamo's engines. What round robin serves was found with Dynamo's own
    /// frontend in real time, seed 1, 60 to 90 s of arrivals. Tenants: no request waits at three
    /// sessions a second; at four they wait for 1.3 s, and five are more than all engines serve.
    /// Agents: at 0.4 no request waits and 82 % of the prompts are hits; at 0.55 it is 77 %,
    /// because engines evict, and a request takes a third longer.
    pub const DYNAMO: [Self; 2] =
        [Self::dynamo("dynamo-agents", RaceWorkload::Agents, 0.4), Self::dynamo("dynamo-tenants", RaceWorkload::Tenants, 3.6)];

    const fn new(name: &'static str, workload: RaceWorkload, load_percent: u32) -> Self {
        Self { name, workload, load_percent, engines: CellEngines::EIGHT, change: CellChange::None, gateways: 1 }
    }

    const fn tight(name: &'static str, workload: RaceWorkload, load_percent: u32, kv_blocks: u32) -> Self {
        Self { engines: CellEngines { kv_blocks: Some(kv_blocks), ..CellEngines::EIGHT }, ..Self::new(name, workload, load_percent) }
    }

    const fn dynamo(name: &'static str, workload: RaceWorkload, capacity_per_s: f64) -> Self {
        let engines = CellEngines { count: 3, kind: EngineProgram::DynamoMocker { capacity_per_s }, ..CellEngines::EIGHT };
        Self { engines, ..Self::new(name, workload, 50) }
    }

    /// All cells, in order.
    pub fn all() -> impl Iterator<Item = Self> {
        Self::CORE.into_iter().chain([Self::TWO_GATEWAYS]).chain(Self::DYNAMO)
    }

    /// The cell of this name.
    #[must_use]
    pub fn find(name: &str) -> Option<Self> {
        Self::all().find(|cell| cell.name == name)
    }

    /// Sessions that arrive each second.
    #[must_use]
    pub fn sessions_per_s(&self) -> f64 {
        self.capacity_per_s() * f64::from(self.load_percent) / 100.0
    }

    /// Sessions a second that round robin can serve.
    fn capacity_per_s(&self) -> f64 {
        let slow = if self.engines.speed == EngineSpeed::HalfAreHalfAsFast { 0.75 } else { 1.0 };
        let engines = self.engines.count as f64 / CellEngines::EIGHT.count as f64;
        match self.engines.kind {
            EngineProgram::ModelServer => self.workload.capacity_per_s() * slow * engines,
            EngineProgram::DynamoMocker { capacity_per_s } => capacity_per_s,
        }
    }

    /// Whether its engines are Dynamo's.
    #[must_use]
    pub fn is_dynamo(&self) -> bool {
        matches!(self.engines.kind, EngineProgram::DynamoMocker { .. })
    }

    /// The sessions of a run that arrive within `arrivals_s` seconds.
    #[must_use]
    pub fn sessions(&self, seed: u64, arrivals_s: f64) -> Vec<RaceSession> {
        self.workload.sessions(seed, self.sessions_per_s(), arrivals_s)
    }
}

impl RaceWorkload {
    /// Sessions a second that round robin can serve with eight engines `qwen3-32b-h200` of at most
    /// 24 sequences: the highest rate of ten minutes of arrivals at which the number of live
    /// sessions stops growing, in virtual time, over five seeds. `simulator race capacity` finds
    /// it. Agents fill the caches before they fill the engines: their capacity is where round robin
    /// begins to evict the contexts of live sessions.
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
        assert!((cell.sessions_per_s() - 1.5).abs() < 1e-9);
    }

    #[test]
    fn a_pool_of_slower_engines_gets_less_load() {
        let [equal, unequal] = ["agents-50", "unequal"].map(|name| Cell::find(name).map_or(0.0, |cell| cell.sessions_per_s()));
        assert!((unequal / equal - 0.75).abs() < 1e-9);
    }
}
