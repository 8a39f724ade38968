//! The state of a pool as one immutable value at one version.

use std::ops::Deref;
use std::sync::Arc;

use crate::endpoint::{Endpoint, EndpointRef};
use crate::endpoint_table::{EndpointTable, InvalidSnapshot};
use crate::latency::LatencyModel;
use crate::latency::step::StepModel;
use crate::metrics::EndpointMetrics;
use crate::objects::Objects;
use crate::pipeline::Pipeline;

/// The version of a pool's state. Each start of the daemon has another `term`, and a newer term
/// forces a full snapshot. Within a term, `sequence` only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The number of the daemon's start.
    pub term: u64,
    /// The number of the version within its term.
    pub sequence: u64,
}

/// The state of a pool at one version, with the pipeline that schedules its requests. A snapshot is
/// immutable: a new version is a new value.
#[derive(Debug)]
pub struct Snapshot {
    version: Version,
    table: EndpointTable,
    pipeline: Arc<Pipeline>,
}

// === impl Snapshot ===

impl Snapshot {
    /// Checks the parts of a snapshot, and returns the snapshot.
    ///
    /// # Errors
    /// Returns [`InvalidSnapshot`] when the snapshot breaks a rule that readers rely on.
    pub fn try_new(
        version: Version,
        endpoints: Vec<Endpoint>,
        metrics: Vec<EndpointMetrics>,
        pipeline: Pipeline,
    ) -> Result<Self, InvalidSnapshot> {
        let table = EndpointTable::seal(endpoints, metrics, Arc::default())?;
        Ok(Self {
            version,
            table,
            pipeline: Arc::new(pipeline),
        })
    }

    /// Returns a snapshot with other endpoints, and the same pipeline and objects.
    ///
    /// # Errors
    /// Returns the errors of [`Self::try_new`].
    pub fn with_endpoints(
        &self,
        version: Version,
        endpoints: Vec<Endpoint>,
        metrics: Vec<EndpointMetrics>,
    ) -> Result<Self, InvalidSnapshot> {
        let mut table = EndpointTable::seal(endpoints, metrics, Arc::clone(&self.objects))?;
        table.step = Arc::clone(&self.step);
        table.latency = self.latency.clone();
        Ok(Self {
            version,
            table,
            pipeline: Arc::clone(&self.pipeline),
        })
    }

    /// Sets the objects of the pool; without objects every request passes unchanged.
    #[must_use]
    pub fn with_objects(mut self, objects: Objects) -> Self {
        self.table.objects = Arc::new(objects);
        self
    }

    /// Sets the step model, instead of [`StepModel::default`].
    #[must_use]
    pub fn with_step(mut self, step: Arc<StepModel>) -> Self {
        self.table.step = step;
        self
    }

    /// Sets the latency model, or removes it.
    #[must_use]
    pub fn with_latency(mut self, latency: Option<Arc<LatencyModel>>) -> Self {
        self.table.latency = latency;
        self
    }

    /// Returns a snapshot with newer metrics and a newer version. Only the metrics are copied.
    ///
    /// # Errors
    /// Returns [`InvalidSnapshot::MetricsLength`] if the number of metrics is not the number of
    /// endpoints.
    pub fn with_metrics(
        &self,
        version: Version,
        metrics: Vec<EndpointMetrics>,
    ) -> Result<Self, InvalidSnapshot> {
        Ok(Self {
            version,
            table: self.table.with_metrics(metrics)?,
            pipeline: Arc::clone(&self.pipeline),
        })
    }

    pub fn version(&self) -> Version {
        self.version
    }

    pub fn pipeline(&self) -> &Pipeline {
        &self.pipeline
    }

    pub fn table(&self) -> &EndpointTable {
        &self.table
    }

    /// Updates the metrics of one endpoint in place, from a reply of its engine. Does nothing if
    /// the endpoint is not in this snapshot.
    pub fn observe(&mut self, endpoint: EndpointRef, update: impl FnOnce(&mut EndpointMetrics)) {
        self.table.observe(endpoint, update);
    }
}

/// Makes the methods of the table also methods of the snapshot.
impl Deref for Snapshot {
    type Target = EndpointTable;

    fn deref(&self) -> &EndpointTable {
        &self.table
    }
}
