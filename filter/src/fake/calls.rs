//! The host calls that a test records, or makes fail.

/// A kind of host call. A test can make each call fail, except reading the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FakeCall {
    Clock,
    Shared,
    Share,
    QueueRegister,
    QueuePush,
    QueuePop,
    StreamOpen,
    StreamSend,
    StreamCancel,
    Call,
    Property,
    PropertySet,
    Headers,
    HeaderSet,
    HeaderRemove,
    Buffer,
    BufferReplace,
    Reply,
    ResumeRequest,
    Focus,
    TickPeriod,
    Metric,
    MetricAdd,
    MetricRecord,
}

/// One successful call, with the bytes that it passes between the module and the proxy.
#[derive(Clone, Debug)]
pub struct RecordedCall {
    pub call: FakeCall,
    /// The name of the header, property, buffer, statistic or shared value.
    pub name: String,
    /// The number of bytes of names and values that the module passes to the proxy.
    pub sent: usize,
    /// The number of bytes that the proxy passes to the module, which copies them into its memory.
    pub received: usize,
}
