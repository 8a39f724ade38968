//! The command line and the commands beside `serve`.

pub mod args;
pub mod build;
pub mod check;
pub mod etcd_access;
pub mod explain;
pub mod logging;
pub mod migrate_alias;
pub mod register;
