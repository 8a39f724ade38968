/**
 * The data of the console, under /api/v1 of the admin listener. Each member is the body of one route.
 */
export interface ConsoleApi {
  overview: Overview;
  history: History;
  decisions: Decisions;
  configs: Configs;
  question: Question;
  explanation: Explanation;
  failure: Failure;
}
/**
 * What the daemon knows now.
 *
 * This interface was referenced by `ConsoleApi`'s JSON-Schema
 * via the `definition` "Overview".
 */
export interface Overview {
  /**
   * The daemon's clock, in ms since 1970
   */
  now_ms: number;
  release: string;
  commit: string;
  /**
   * Grows with each start of the daemon.
   */
  term: number;
  /**
   * When the snapshot file was written; null without one.
   */
  snapshot_written_ms: number | null;
  pools: Pool[];
  proxies: Proxy[];
  /**
   * What the daemon or its proxies refused since the daemon started, by kind.
   */
  refusals: {
    [k: string]: number;
  };
}
/**
 * A pool.
 *
 * This interface was referenced by `ConsoleApi`'s JSON-Schema
 * via the `definition` "Pool".
 */
export interface Pool {
  name: string;
  /**
   * Whether the pool has had a complete set of endpoints; until then it is not served.
   */
  complete: boolean;
  /**
   * Grows with each change of endpoints, configuration or objects.
   */
  revision: number;
  profiles: string[];
  /**
   * Metrics older than this count as unknown.
   */
  staleness_max_ms: number;
  discovery_error: string | null;
  config_error: string | null;
  objects_error: string | null;
  /**
   * Whether latency prediction is switched on.
   */
  latency_prediction: boolean;
  /**
   * Whether there is a latency model.
   */
  predicts: boolean;
  /**
   * Workers of proxies that reported within 10 s, the ext_proc server included.
   */
  vms: number;
  /**
   * Requests that proxies refused, by reason.
   */
  dropped: {
    [k: string]: number;
  };
  /**
   * Whether flow control is switched on.
   */
  flow_control: boolean;
  /**
   * The bands of flow control that had a request, the highest priority first.
   */
  bands: Band[];
  endpoints: Endpoint[];
  /**
   * The 100 models with the most requests.
   */
  models: Model[];
}
/**
 * The requests of one priority in flow control, over all proxies.
 *
 * This interface was referenced by `ConsoleApi`'s JSON-Schema
 * via the `definition` "Band".
 */
export interface Band {
  priority: number;
  /**
   * Requests held now.
   */
  held: number;
  /**
   * Bytes of the requests held: of their bodies, and of the memory that the proxy keeps.
   */
  bytes: number;
  /**
   * How long the oldest of them has waited; null if none is held.
   */
  oldest_ms: number | null;
  /**
   * The endpoint that was picked for the oldest one and had no room; null if none could be picked.
   */
  full: string | null;
  /**
   * Requests by outcome since their proxies started, under llm-d's names.
   */
  outcomes: {
    [k: string]: number;
  };
  /**
   * The time in the queue of requests that were sent.
   */
  wait_ms: Quantiles | null;
}
/**
 * Quantiles in ms, interpolated within the buckets of a histogram.
 *
 * This interface was referenced by `ConsoleApi`'s JSON-Schema
 * via the `definition` "Quantiles".
 */
export interface Quantiles {
  p50: number;
  p99: number;
}
/**
 * An endpoint of a pool.
 *
 * This interface was referenced by `ConsoleApi`'s JSON-Schema
 * via the `definition` "Endpoint".
 */
export interface Endpoint {
  name: string;
  address: string;
  state: "ready" | "unconfirmed" | "departing" | "waiting";
  /**
   * Why it is in this state; empty if there is nothing to say.
   */
  reason: string;
  /**
   * Since when, in ms since 1970
   */
  since_ms: number;
  /**
   * Requests that proxies have outstanding there.
   */
  in_flight: number;
  prefill_tokens: number;
  decode_tokens: number;
  /**
   * Prompts without a first token yet.
   */
  waiting_prompts: number;
  /**
   * Requests that wait in the engine, as it reports; null if unknown.
   */
  queue_depth: number | null;
  /**
   * Requests that run in the engine, as it reports.
   */
  running: number | null;
  /**
   * Share of the KV cache in use, 0 to 1, as it reports.
   */
  kv: number | null;
  /**
   * Decisions with this endpoint first.
   */
  picked: number;
  /**
   * Requests that it answered.
   */
  served: number;
  /**
   * Attempts that it refused or reset before a response.
   */
  failed: number;
  /**
   * Learned time of a prefill, as a multiple of an average endpoint's; null if not learned.
   */
  prefill_time: number | null;
  /**
   * Learned time of a decode step, likewise.
   */
  decode_time: number | null;
  /**
   * Prompt tokens of finished requests whose usage says how many were cached.
   */
  prompt_tokens: number;
  /**
   * How many of these the engine had cached.
   */
  cached_tokens: number;
}
/**
 * Requests of one model, target and priority, since their proxies started.
 *
 * This interface was referenced by `ConsoleApi`'s JSON-Schema
 * via the `definition` "Model".
 */
export interface Model {
  model: string;
  /**
   * The model in the request to the endpoint.
   */
  target: string;
  priority: number;
  requests: number;
  running: number;
  /**
   * Error answers by HTTP status.
   */
  errors: {
    [k: string]: number;
  };
  prompt_tokens: number;
  cached_tokens: number;
  output_tokens: number;
  slo_met: number;
  slo_missed: number;
  slo_shed: number;
}
/**
 * A proxy with an open state stream.
 *
 * This interface was referenced by `ConsoleApi`'s JSON-Schema
 * via the `definition` "Proxy".
 */
export interface Proxy {
  node_id: string;
  /**
   * Identifies the process until the daemon restarts; made of its random id, which is secret.
   */
  process_id: string;
  peer: string;
  certificate: string | null;
  /**
   * The release of the filter; null if it is too old to send it.
   */
  release: string | null;
  /**
   * When the stream was opened, in ms since 1970
   */
  since_ms: number;
  /**
   * The time since the last report of the proxy, which comes about once a second; null before the first.
   */
  heard_ms: number | null;
  pools: ProxyPool[];
}
/**
 * The state of a pool that a proxy has.
 *
 * This interface was referenced by `ConsoleApi`'s JSON-Schema
 * via the `definition` "ProxyPool".
 */
export interface ProxyPool {
  pool: string;
  /**
   * The newest revision of the pool.
   */
  revision: number | null;
  /**
   * The revision sent last.
   */
  sent: number | null;
  /**
   * The newest revision that the proxy applied.
   */
  acknowledged: number | null;
  /**
   * The time since the proxy applied that revision; null if it has applied none.
   */
  age_ms: number | null;
  /**
   * Endpoints withheld until the proxy's Envoy has them.
   */
  withheld: number;
  /**
   * Why the proxy refused the last pool update.
   */
  refused: string | null;
}
/**
 * Traffic and latency of the last hour.
 *
 * This interface was referenced by `ConsoleApi`'s JSON-Schema
 * via the `definition` "History".
 */
export interface History {
  interval_seconds: number;
  samples_max: number;
  pools: PoolHistory[];
}
/**
 * The samples of one pool, oldest first.
 *
 * This interface was referenced by `ConsoleApi`'s JSON-Schema
 * via the `definition` "PoolHistory".
 */
export interface PoolHistory {
  name: string;
  samples: Sample[];
}
/**
 * The traffic within one interval.
 *
 * This interface was referenced by `ConsoleApi`'s JSON-Schema
 * via the `definition` "Sample".
 */
export interface Sample {
  /**
   * The end of the interval, in ms since 1970
   */
  at_ms: number;
  /**
   * The length of the interval.
   */
  seconds: number;
  requests: number;
  /**
   * Answers with status 400 to 499.
   */
  client_errors: number;
  /**
   * Answers with status 500 and above.
   */
  server_errors: number;
  /**
   * Requests that proxies refused.
   */
  refused: number;
  prompt_tokens: number;
  cached_tokens: number;
  output_tokens: number;
  /**
   * Requests outstanding at the end of the interval.
   */
  running: number;
  /**
   * Requests that flow control held at the end of the interval.
   */
  held: number;
  slo_met: number;
  slo_missed: number;
  slo_shed: number;
  ttft_ms: Quantiles | null;
  tpot_ms: Quantiles | null;
  duration_ms: Quantiles | null;
}
/**
 * Sampled decisions, newest first.
 *
 * This interface was referenced by `ConsoleApi`'s JSON-Schema
 * via the `definition` "Decisions".
 */
export interface Decisions {
  kept_per_pool_max: number;
  decisions: SampledDecision[];
}
/**
 * A decision that a proxy sampled.
 *
 * This interface was referenced by `ConsoleApi`'s JSON-Schema
 * via the `definition` "SampledDecision".
 */
export interface SampledDecision {
  id: number;
  pool: string;
  /**
   * When the daemon received it, in ms since 1970
   */
  at_ms: number;
  /**
   * The node id of the proxy, or ext_proc.
   */
  source: string;
  model: string;
  /**
   * As the proxy estimated them.
   */
  prompt_tokens: number;
  priority: number;
  /**
   * Endpoints of the pool.
   */
  endpoints: number;
  /**
   * Tokens of the prompt that the best endpoint had cached, as the proxy estimated them.
   */
  cached_tokens_max: number;
  /**
   * Addresses in the order in which they are tried: the picker's first choice, then the one of its other choices that answered most recently, which need not be the second best, then the rest.
   */
  picked: string[];
}
/**
 * The configuration of each pool.
 *
 * This interface was referenced by `ConsoleApi`'s JSON-Schema
 * via the `definition` "Configs".
 */
export interface Configs {
  pools: PoolConfig[];
}
/**
 * This interface was referenced by `ConsoleApi`'s JSON-Schema
 * via the `definition` "PoolConfig".
 */
export interface PoolConfig {
  name: string;
  /**
   * null: the pool has the default.
   */
  file: string | null;
  /**
   * The text of the EndpointPickerConfig in force; of a pool without one, the text of the default.
   */
  text: string;
}
/**
 * The body of POST /api/v1/explain: a sampled decision, or a request; and variations.
 *
 * This interface was referenced by `ConsoleApi`'s JSON-Schema
 * via the `definition` "Question".
 */
export interface Question {
  /**
   * May be left out where there is one.
   */
  pool?: string;
  /**
   * The id of a sampled decision.
   */
  decision?: number;
  /**
   * The body of a request, or a decision record of an access log.
   */
  request?: string;
  /**
   * The request's path.
   */
  path?: string;
  /**
   * Addresses of endpoints to leave out.
   */
  without?: string[];
  /**
   * Text of an EndpointPickerConfig to use instead of the one in force.
   */
  config?: string;
}
/**
 * A decision with its reasons.
 *
 * This interface was referenced by `ConsoleApi`'s JSON-Schema
 * via the `definition` "Explanation".
 */
export interface Explanation {
  pool: string;
  /**
   * Addresses in the order in which they are tried: the picker's first choice, then the one of its other choices that answered most recently, which need not be the second best, then the rest.
   */
  picked: string[];
  candidates: Candidate[];
  profile?: string;
  /**
   * What the proxy picked at that time.
   */
  was_picked?: string[];
  prefill?: string[];
  encode?: string[];
  data_parallel?: string[];
  profiles?: ProfileCandidates[];
  /**
   * The drop reason.
   */
  refused?: string;
  /**
   * Why flow control holds the request; the pick is the one that it would get now.
   */
  held?: {
    /**
     * How long it has been held.
     */
    ms: number;
    priority: number;
    /**
     * The address of the endpoint that was picked and has no room; null if none could be picked.
     */
    full: string | null;
  };
  /**
   * The answer to the client instead of a pick.
   */
  reply?: {
    status: number;
    /**
     * The error in the shape of its API.
     */
    body: {
      [k: string]: unknown;
    };
  };
  /**
   * What this explanation does not know.
   */
  note?: string;
}
/**
 * An endpoint that was considered.
 *
 * This interface was referenced by `ConsoleApi`'s JSON-Schema
 * via the `definition` "Candidate".
 */
export interface Candidate {
  /**
   * Its address.
   */
  endpoint: string;
  /**
   * The plugin that removed it.
   */
  dropped_by: string | null;
  /**
   * Scores by scorer.
   */
  scores: {
    [k: string]: number;
  };
  /**
   * The weighted sum of the scores.
   */
  total: number | null;
  /**
   * Terms of the cost, in ms.
   */
  cost?: {
    [k: string]: number;
  };
  /**
   * The estimated tokens, and the predicted times.
   */
  predicted?: {
    [k: string]: unknown;
  } | null;
}
/**
 * The candidates of a further profile.
 *
 * This interface was referenced by `ConsoleApi`'s JSON-Schema
 * via the `definition` "ProfileCandidates".
 */
export interface ProfileCandidates {
  name: string;
  candidates: Candidate[];
}
/**
 * The body of an error.
 *
 * This interface was referenced by `ConsoleApi`'s JSON-Schema
 * via the `definition` "Failure".
 */
export interface Failure {
  error: string;
}
