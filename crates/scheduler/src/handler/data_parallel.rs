//! `data-parallel-profile-handler`: each rank of a model server is an endpoint with a separate
//! port, but all requests are sent to the port of one rank. The sidecar at that port forwards a
//! request to the rank that a header names.
//!
//! The ranked list has only one endpoint, because the header names one rank, and the primary port
//! of another pod cannot reach that rank. If the primary port of the picked rank is not an allowed
//! endpoint, the request is sent to the rank itself.

use std::net::SocketAddr;

use crate::decision::{Decision, RankedList, Route};
use crate::endpoint::EndpointIndex;
use crate::plugin::{InvalidParameter, Parameter, Parameters, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::run::{ProfileHandler, Reference, SchedulingRun};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "data-parallel-profile-handler",
    kind: PluginKind::ProfileHandler,
    doc: readable(
        "Runs the only profile. The request goes to primaryPort at the picked address; \
        x-data-parallel-host-port names the pick.",
    ),
    source: readable(
        "llm-d-router, profilehandler/dataparallel (deprecated: list every rank's port instead)",
    ),
    parameters: &[Parameter::number(
        "primaryPort",
        8000.0,
        "port that receives the requests for all ranks of a pod, integer from 1 to 65535",
    )],
    needs: &[],
    build,
};

#[derive(Debug)]
struct DataParallelProfileHandler {
    primary_port: u16,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    let port = parameters.integer("primaryPort", 1..=u32::from(u16::MAX))?;
    Ok(Plugin::ProfileHandler(Box::new(
        DataParallelProfileHandler {
            primary_port: u16::try_from(port).unwrap_or(u16::MAX),
        },
    )))
}

impl DataParallelProfileHandler {
    fn primary_of(&self, rank: EndpointIndex, run: &SchedulingRun<'_>) -> Option<EndpointIndex> {
        let table = run.context().table;
        let primary = SocketAddr::new(table.socket(rank)?.ip(), self.primary_port);
        run.allowed()
            .iter()
            .copied()
            .find(|&index| table.socket(index) == Some(primary))
    }
}

impl ProfileHandler for DataParallelProfileHandler {
    fn references(&self) -> Vec<Reference<'_>> {
        vec![Reference::OnlyProfile]
    }

    fn route(&self, run: &mut SchedulingRun<'_>) -> Decision {
        let ranked = match run.only_profile() {
            Ok(ranked) => ranked,
            Err(refused) => return refused,
        };
        let rank = ranked.first();
        match self.primary_of(rank, run) {
            Some(primary) => Decision::Route(Route {
                data_parallel: Some(rank),
                ..Route::to(RankedList::one(primary))
            }),
            None => Decision::Route(Route::to(ranked)),
        }
    }
}
