//! A network partition of a minute: longer than every timeout on either side.

use std::time::Duration;

use testbed::Result;

#[path = "../it/partition.rs"]
mod drill;

#[tokio::test]
async fn a_minute_of_partition_by_stream() -> Result<()> {
    drill::partitioned_for(Duration::from_secs(60), "grpc").await
}

#[tokio::test]
async fn a_minute_of_partition_by_calls() -> Result<()> {
    drill::partitioned_for(Duration::from_secs(60), "http").await
}
