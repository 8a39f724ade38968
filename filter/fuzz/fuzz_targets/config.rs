//! Reads any bytes as the filter's configuration. An accepted one must be usable, and an error must
//! name a field. Reads the same bytes as a header map: no pair may be longer than the bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use switchpoint::config::{CLUSTERS_MAX, FilterConfig, POOLS_MAX};
use switchpoint::pairs::HeaderPairs;

fuzz_target!(|bytes: &[u8]| {
    match FilterConfig::parse(bytes) {
        Ok(config) => {
            assert!((1..=POOLS_MAX).contains(&config.pools.len()));
            for (i, pool) in config.pools.iter().enumerate() {
                assert!(!pool.name.is_empty() && pool.clusters.len() <= CLUSTERS_MAX);
                assert_eq!(config.pool_named(pool.name.as_bytes()), Some(i));
                assert!(
                    pool.clusters
                        .iter()
                        .all(|c| config.pool_of_cluster(c.as_bytes()) == Some(i))
                );
            }
            assert!(config.settings.ready_path.starts_with('/') && config.lease_ms >= 500);
        }
        // The name of an unknown field may be empty.
        Err(invalid) => assert!(
            !invalid.must.is_empty()
                && (!invalid.field.is_empty() || invalid.must.starts_with("left out"))
        ),
    }
    let held: usize = HeaderPairs::new(bytes)
        .map(|(name, value)| name.len() + value.len() + 10)
        .sum();
    assert!(held <= bytes.len());
});
