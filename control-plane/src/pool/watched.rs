//! The endpoints of one pool as their source reports them.

use discovery::{SetChanges, WatchedComponent};

/// The source of a pool's endpoints.
pub struct EndpointSource {
    /// Complete sets of instances, one for each change.
    pub changes: SetChanges,
    /// The discovered components; empty for a file or a fixed list.
    pub components: WatchedComponents,
}

/// The components of a pool, by name.
pub type WatchedComponents = Vec<(String, WatchedComponent)>;

impl EndpointSource {
    /// A source without components.
    pub fn plain(changes: SetChanges) -> Self {
        Self {
            changes,
            components: Vec::new(),
        }
    }
}
