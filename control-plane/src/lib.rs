//! switchpointd: discovers, scrapes and pushes state to the filters.

pub mod scrape;
