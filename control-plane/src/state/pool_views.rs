//! The newest view of each pool. The task of a pool writes its view; all others read it.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::watch;

use crate::pool::writer::PoolView;

/// The names of the configured pools, and the newest view of each.
#[derive(Debug)]
pub struct PoolTable {
    /// The names of all configured pools, with or without a complete set of endpoints.
    pub names: Vec<Arc<str>>,
    pub views: watch::Sender<PoolViews>,
}

/// The newest view of each pool, by name.
#[derive(Clone, Debug, Default)]
pub struct PoolViews(BTreeMap<Arc<str>, Arc<PoolView>>);

// === impl PoolTable ===

impl PoolTable {
    /// Creates a table of these pools, without views.
    #[must_use]
    pub fn new(names: Vec<Arc<str>>) -> Self {
        Self {
            names,
            views: watch::Sender::default(),
        }
    }

    /// Publishes a new view of a pool to the readers.
    pub fn publish(&self, view: PoolView) {
        self.views.send_modify(|pools| {
            pools.0.insert(Arc::clone(&view.name), Arc::new(view));
        });
    }

    /// Returns the view of a pool, if it has a complete set of endpoints.
    #[must_use]
    pub fn view(&self, name: &str) -> Option<PoolView> {
        self.views.borrow().get(name).cloned()
    }

    /// Returns all views, complete or not.
    #[must_use]
    pub fn all(&self) -> Vec<PoolView> {
        self.views.borrow().iter().cloned().collect()
    }
}

// === impl PoolViews ===

impl PoolViews {
    /// Returns the pool with this name, if it has a complete set of endpoints.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&PoolView> {
        self.0
            .get(name)
            .map(AsRef::as_ref)
            .filter(|view| view.sources.complete)
    }

    /// Returns all views, complete or not.
    pub fn iter(&self) -> impl Iterator<Item = &PoolView> {
        self.0.values().map(AsRef::as_ref)
    }
}
