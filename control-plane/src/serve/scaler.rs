//! The external scaler for KEDA: `externalscaler.ExternalScaler`.
//!
//! The metric is the number of desired replicas, and its target is 1. So the HPA that KEDA creates
//! sets that number of replicas. The metadata of a trigger names the pool, the group and the goal
//! ([`ScalingRequest`]). A trigger that cannot be read is an `INVALID_ARGUMENT`, which KEDA shows
//! as an event of the ScaledObject. A pool that is not completely known is `UNAVAILABLE`, so KEDA
//! tries again and keeps the number of replicas.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use futures::Stream;
use proto::external_scaler::external_scaler_server::{ExternalScaler, ExternalScalerServer};
use proto::external_scaler::{
    GetMetricSpecResponse, GetMetricsRequest, GetMetricsResponse, IsActiveResponse, MetricSpec,
    MetricValue, ScaledObjectRef,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::cli::args::OptionalAddress;
use crate::error::FatalError;
use crate::scaling::{EndpointGroup, SAMPLE_INTERVAL, ScalingRequest, ScalingSignals};
use crate::serve::listen::{IncomingConnections, ListenerName, ServerTls, identify};
use crate::serve::monitoring::{ended, open, server};
use crate::shutdown::Shutdown;
use crate::state::pool_views::PoolTable;

/// The name of the metric. KEDA adds the number of the trigger as a prefix.
pub const METRIC: &str = "desired-replicas";

/// The largest request, in bytes: the name of an object and the metadata of a trigger. Kubernetes
/// allows 256 KiB of annotations, and a trigger has a few lines.
const REQUEST_BYTES_MAX: usize = 64 << 10;

/// The maximum number of open streams. KEDA opens one stream for each `external-push` trigger.
const STREAMS_MAX: usize = 256;

/// The maximum number of open HTTP/2 streams of one connection. KEDA uses one connection for all
/// triggers: for their streams, and for its other calls.
const STREAMS_PER_CONNECTION_MAX: u32 = 512;

/// The listener of the scaler, which is not served yet.
#[derive(Debug)]
pub struct ScalerListener(IncomingConnections);

#[derive(Clone, Debug)]
pub struct ScalerServer {
    pools: Arc<PoolTable>,
    signals: Arc<ScalingSignals>,
    streams: Arc<Semaphore>,
    shutdown: Shutdown,
}

/// The answer to a trigger.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ScalerAnswer {
    active: bool,
    desired: f64,
}

type ActiveStream = Pin<Box<dyn Stream<Item = Result<IsActiveResponse, Status>> + Send>>;

// === impl ScalerListener ===

impl ScalerListener {
    /// Opens the listener, if there is one.
    ///
    /// # Errors
    /// Returns [`FatalError::Listen`] if the listener cannot be opened.
    pub async fn open(
        OptionalAddress(address): OptionalAddress,
        shutdown: &Shutdown,
    ) -> Result<Option<Self>, FatalError> {
        let Some(address) = address else {
            return Ok(None);
        };
        Ok(Some(Self(
            open(ListenerName::Scaler, address, ServerTls::Off, shutdown).await?,
        )))
    }

    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.0.address()
    }

    /// Serves until `shutdown`.
    pub fn spawn(
        self,
        tasks: &mut JoinSet<&'static str>,
        pools: Arc<PoolTable>,
        signals: Arc<ScalingSignals>,
        shutdown: &Shutdown,
    ) {
        let streams = Arc::new(Semaphore::new(STREAMS_MAX));
        let scaler = ScalerServer {
            pools,
            signals,
            streams,
            shutdown: shutdown.clone(),
        };
        let service =
            ExternalScalerServer::new(scaler).max_decoding_message_size(REQUEST_BYTES_MAX);
        let mut shutdown = shutdown.clone();
        tasks.spawn(async move {
            let served = server()
                .max_concurrent_streams(STREAMS_PER_CONNECTION_MAX)
                .layer(identify())
                .add_service(service)
                .serve_with_incoming_shutdown(self.0, async move { shutdown.begun().await })
                .await;
            ended(served, "scaler listener")
        });
    }
}

// === impl ScalerServer ===

impl ScalerServer {
    fn read(&self, object: &ScaledObjectRef) -> Result<ScalingRequest, Status> {
        let pools = self.pools.names.iter().map(|name| &**name);
        ScalingRequest::read(&object.scaler_metadata, &self.signals.goal, pools)
            .map_err(Status::invalid_argument)
    }

    fn answer(&self, wanted: &ScalingRequest) -> Result<ScalerAnswer, Status> {
        if self.pools.view(&wanted.pool).is_none() {
            return Err(Status::unavailable(
                "the pool has no complete set of endpoints yet; retry",
            ));
        }
        let now = Instant::now();
        let groups = self.signals.groups(&wanted.pool, now);
        let refused = self.signals.refuses(&wanted.pool, now);
        let group = wanted.group(&groups).map_err(Status::invalid_argument)?;
        Ok(group.map_or_else(
            || ScalerAnswer::of_empty_pool(wanted, refused),
            |group| ScalerAnswer::for_group(group, wanted),
        ))
    }
}

#[tonic::async_trait]
impl ExternalScaler for ScalerServer {
    type StreamIsActiveStream = ActiveStream;

    async fn is_active(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> Result<Response<IsActiveResponse>, Status> {
        let answer = self.answer(&self.read(request.get_ref())?)?;
        Ok(Response::new(IsActiveResponse {
            result: answer.active,
        }))
    }

    async fn stream_is_active(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> Result<Response<ActiveStream>, Status> {
        let wanted = self.read(request.get_ref())?;
        let permit = Arc::clone(&self.streams).try_acquire_owned();
        let permit = permit.map_err(|_| {
            Status::resource_exhausted(format!(
                "more than {STREAMS_MAX} streams are open; retry later"
            ))
        })?;
        let (sender, answers) = mpsc::channel(1);
        tokio::spawn(push(self.clone(), wanted, sender, permit));
        Ok(Response::new(Box::pin(ReceiverStream::new(answers))))
    }

    async fn get_metric_spec(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> Result<Response<GetMetricSpecResponse>, Status> {
        self.read(request.get_ref())?;
        let spec = MetricSpec {
            metric_name: METRIC.to_owned(),
            target_size: 1,
            target_size_float: 1.0,
        };
        Ok(Response::new(GetMetricSpecResponse {
            metric_specs: vec![spec],
        }))
    }

    async fn get_metrics(
        &self,
        request: Request<GetMetricsRequest>,
    ) -> Result<Response<GetMetricsResponse>, Status> {
        let GetMetricsRequest {
            scaled_object_ref,
            metric_name,
        } = request.into_inner();
        if metric_name != METRIC {
            return Err(Status::invalid_argument(format!(
                "metricName: the only metric is {METRIC}"
            )));
        }
        let object = scaled_object_ref
            .ok_or_else(|| Status::invalid_argument("scaledObjectRef: missing"))?;
        let ScalerAnswer { desired, .. } = self.answer(&self.read(&object)?)?;
        #[expect(clippy::cast_possible_truncation, reason = "at most 1,024 replicas")]
        let metric_value = desired.ceil() as i64;
        let value = MetricValue {
            metric_name,
            metric_value,
            metric_value_float: desired,
        };
        Ok(Response::new(GetMetricsResponse {
            metric_values: vec![value],
        }))
    }
}

/// Sends whether the workload is active, first immediately and then at each change. Returns when
/// the stream ends.
async fn push(
    scaler: ScalerServer,
    wanted: ScalingRequest,
    answers: mpsc::Sender<Result<IsActiveResponse, Status>>,
    _permit: OwnedSemaphorePermit,
) {
    let mut shutdown = scaler.shutdown.clone();
    let mut tick = tokio::time::interval(SAMPLE_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut sent = None;
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            () = answers.closed() => return,
            () = shutdown.begun() => return,
        }
        let answer = match scaler.answer(&wanted) {
            Ok(answer) if sent.replace(answer.active) == Some(answer.active) => continue,
            answer => answer.map(|answer| IsActiveResponse {
                result: answer.active,
            }),
        };
        let failed = answer.is_err();
        if answers.send(answer).await.is_err() || failed {
            return;
        }
    }
}

// === impl ScalerAnswer ===

impl ScalerAnswer {
    fn for_group(group: &EndpointGroup, wanted: &ScalingRequest) -> Self {
        let signal = group.signal(&wanted.goal);
        let works = signal.busy > 0.0 || signal.backlog_s != Some(0.0);
        Self {
            active: works || wanted.goal.replicas.0 > 0,
            desired: signal.desired,
        }
    }

    /// Returns the answer for a pool without endpoints. The pool is active if requests are refused,
    /// and needs one replica for these requests.
    fn of_empty_pool(wanted: &ScalingRequest, refused: bool) -> Self {
        let least = f64::from(wanted.goal.replicas.0);
        Self {
            active: refused || least > 0.0,
            desired: if refused { least.max(1.0) } else { least },
        }
    }
}
