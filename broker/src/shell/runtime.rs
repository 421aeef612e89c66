//! `serve`: from settings to running shards, and back to a clean stop.
//!
//! Order of a start: host, lock, identity, metadata, boot counter, term; then shards recover, each on its own pinned
//! thread; then they take their topics over, and only when every new leader epoch is durable they listen. Whatever
//! fails before that ends the start with a message; whatever breaks a shard later ends the whole process with its
//! own exit status: never half alive.

use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use ringfence_engine::config::StoreConfig;
use ringfence_engine::error::Fatal;
use ringfence_engine::io::mailbox::{Endpoint, Full, mesh};
use ringfence_engine::io::probe::{self, Finding, Needs, Verdict};
use ringfence_engine::io::uring::{IoEvent, Reactor, RingConfig, RingError, now};
use ringfence_engine::meta::{JournalSet, NodeMeta};
use ringfence_engine::recovery::{RecoverError, RecoveryReport, open_set};
use ringfence_engine::store::Store;
use ringfence_engine::types::ShardId;
use thiserror::Error;
use tokio::sync::oneshot;

use super::control::{self, random_id};
use super::datadir::{DataDir, DataDirError};
use crate::config::{Config, Cores, HostPort};
use crate::event::{Event, Mail, Outbox, Peer};
use crate::metadata::MetadataError;
use crate::metadata::catalog::{Boot, Catalog, boot, cluster_id};
use crate::metadata::embedded::Embedded;
use crate::native::{ClusterId, NodeId};
use crate::shard::{NodeInfo, Shard};
use crate::stats::ShardStats;

/// Messages that fit into the mailbox of each directed pair; more wait at the sender.
const MAILBOX: usize = 1024;

/// Descriptors beside connections: segments, indexes, journals, rings.
const OTHER_DESCRIPTORS: u64 = 4096;

/// Journal files are a multiple of this many bytes: the largest frame grain.
const JOURNAL_STEP: u64 = 64 << 10;

/// Fewest files of a journal that the engine takes.
const FEWEST_JOURNAL_FILES: u64 = 5;

/// Nanoseconds until mail that found a full mailbox is tried again.
const RETRY: u64 = 1_000_000;

/// Why the node does not serve, or does no longer.
#[derive(Debug, Error)]
pub enum ServeError {
    #[error(transparent)]
    DataDir(#[from] DataDirError),
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    #[error("this host cannot run ringfence:{}", list(.0))]
    Host(Vec<Finding>),
    #[error("cores: {0}")]
    Cores(String),
    #[error("cannot listen on {address}: {source}; is another process using the address?")]
    Listen { address: SocketAddr, source: io::Error },
    #[error("shard {shard} cannot start: {source}")]
    Ring { shard: ShardId, source: RingError },
    #[error("shard {shard} cannot recover: {source}")]
    Recover { shard: ShardId, source: RecoverError },
    #[error("{what}: {source}")]
    Io { what: &'static str, source: io::Error },
    #[error(transparent)]
    Fatal(#[from] Fatal),
}

impl ServeError {
    /// Exit status of the process: 1 for a start that was refused, 70 and above for a process that broke.
    #[must_use]
    pub fn exit_status(&self) -> u8 {
        match self {
            ServeError::Fatal(Fatal::Ring(_)) => 70,
            ServeError::Fatal(Fatal::Panic(_)) => 71,
            ServeError::Fatal(Fatal::Identity(_))
            | ServeError::Recover {
                source: RecoverError::Damaged { .. },
                ..
            } => 72,
            _ => 1,
        }
    }
}

fn list(findings: &[Finding]) -> String {
    findings
        .iter()
        .map(|finding| format!("\n  {}: {}; {}", finding.name, finding.found, finding.fix))
        .collect()
}

/// What travels between the threads: mail of the machines, and what only their drivers need.
#[derive(Debug)]
pub(super) enum Post {
    /// For the machine.
    Mail(Mail),
    /// To a shard: listen there.
    Listen(SocketAddr),
    /// To control: what came of it.
    Listening(Result<(), io::Error>),
    /// To a shard: accept nothing more.
    StopListening,
    /// To control: the sender's thread ends.
    Ended,
}

/// Mail that found its mailbox full, by receiver, in order. Bounded by what the machines let be in work at once.
pub(super) struct Outgoing(Vec<VecDeque<Post>>);

impl Outgoing {
    pub(super) fn new(endpoints: usize) -> Outgoing {
        Outgoing((0..endpoints).map(|_| VecDeque::new()).collect())
    }

    pub(super) fn send(&mut self, endpoint: &mut Endpoint<Post>, to: usize, post: Post) {
        if !self.0[to].is_empty() {
            self.0[to].push_back(post);
        } else if let Err(Full(post)) = endpoint.send(to, post) {
            self.0[to].push_back(post);
        }
    }

    /// Tries again.
    pub(super) fn flush(&mut self, endpoint: &mut Endpoint<Post>) {
        for (to, queue) in self.0.iter_mut().enumerate() {
            while let Some(post) = queue.pop_front() {
                if let Err(Full(post)) = endpoint.send(to, post) {
                    queue.push_front(post);
                    break;
                }
            }
        }
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.0.iter().any(|queue| !queue.is_empty())
    }
}

/// What the threads tell the one that started them.
enum ThreadNews {
    Recovered(ShardId, RecoveryReport),
    Ended(String, Result<(), ServeError>),
}

/// Runs a node until SIGTERM or SIGINT.
///
/// # Errors
/// Why it did not start, or what broke it; see [`ServeError::exit_status`].
pub fn serve(config: &Config) -> Result<(), ServeError> {
    let data = DataDir::open(&config.data_dir)?;
    check_host(&data, config)?;
    let cores = pick_cores(&config.cores)?;
    let shards = cores.len() as u16;
    let (native, admin) = bind(config)?;
    let (catalog, boot) = open_metadata(&data, config)?;
    let set = open_journals(&data, config, shards)?;
    let node = node_info(config, native, shards, &boot);
    let mut endpoints = mesh(usize::from(shards) + 1, MAILBOX).map_err(|source| ServeError::Io {
        what: "making the mailboxes",
        source,
    })?;
    let stats: Vec<Arc<ShardStats>> = cores.iter().map(|_| Arc::default()).collect();
    let (to_main, news) = channel();
    let (recovered, await_recovery) = oneshot::channel();
    let control = control::Setup {
        catalog,
        node: node.clone(),
        epoch: boot.epoch,
        default_partitions: config.num_partitions,
        endpoint: endpoints.pop().expect("the mesh has one corner more than shards"),
        stats: stats.clone(),
        native,
        admin,
        recovered: await_recovery,
    };
    spawn("control".to_owned(), to_main.clone(), move || {
        control::run(control)
    })?;
    for (((core, endpoint), stats), shard) in cores.into_iter().zip(endpoints).zip(stats).zip(0..) {
        let id = ShardId(shard);
        let setup = ShardSetup {
            id,
            core,
            ring: RingConfig::new(data.path()),
            store: StoreConfig {
                generation: set.generation,
                term: set.term,
                ..store_config(config, id)
            },
            node: node.clone(),
            limits: config.limits.clone(),
            endpoint,
            stats,
        };
        let sender = to_main.clone();
        spawn(format!("shard-{shard}"), to_main.clone(), move || {
            run_shard(setup, &sender)
        })?;
    }
    drop(to_main);
    supervise(&news, shards, recovered)
}

/// Waits for the end of every thread; the first that breaks ends the node.
fn supervise(
    news: &Receiver<ThreadNews>,
    shards: u16,
    recovered: oneshot::Sender<()>,
) -> Result<(), ServeError> {
    let mut left = shards;
    let mut recovered = Some(recovered);
    for item in news {
        match item {
            ThreadNews::Recovered(shard, report) => {
                tracing::info!(shard = shard.0, ?report, "shard recovered");
                left -= 1;
                if left == 0
                    && let Some(sender) = recovered.take()
                {
                    // Control is gone only when it broke, which its own news will say.
                    let _ = sender.send(());
                }
            }
            ThreadNews::Ended(name, result) => {
                tracing::info!(thread = %name, ok = result.is_ok(), "thread ended");
                result?;
            }
        }
    }
    Ok(())
}

fn check_host(data: &DataDir, config: &Config) -> Result<(), ServeError> {
    let needs = Needs {
        descriptors: config.limits.max_connections as u64 + OTHER_DESCRIPTORS,
    };
    let findings = probe::examine(data.path(), needs);
    for finding in findings.iter().filter(|finding| finding.verdict == Verdict::Warn) {
        tracing::warn!(what = finding.name, found = %finding.found, fix = %finding.fix, "host");
    }
    let fatal: Vec<Finding> = findings
        .into_iter()
        .filter(|finding| finding.verdict == Verdict::Fail)
        .collect();
    match fatal.is_empty() {
        true => Ok(()),
        false => Err(ServeError::Host(fatal)),
    }
}

/// The cores that carry a shard each.
fn pick_cores(wanted: &Cores) -> Result<Vec<usize>, ServeError> {
    let allowed = affinity::get_thread_affinity().map_err(|error| ServeError::Cores(error.to_string()))?;
    let picked = match wanted {
        Cores::All => allowed,
        Cores::Count(count) if usize::from(*count) <= allowed.len() => {
            allowed[..usize::from(*count)].to_vec()
        }
        Cores::Count(count) => {
            let message = format!("{count} asked for, {} usable by this process", allowed.len());
            return Err(ServeError::Cores(message));
        }
        Cores::List(list) => {
            let list: Vec<usize> = list.iter().map(|core| usize::from(*core)).collect();
            if let Some(core) = list.iter().find(|core| !allowed.contains(core)) {
                let message = format!("core {core} is not usable by this process, which may use {allowed:?}");
                return Err(ServeError::Cores(message));
            }
            list
        }
    };
    Ok(picked)
}

/// The native address, known to be free, and the admin listener. Shards share the native port (SO_REUSEPORT), which
/// would let a second broker share it too: so it is bound once without.
fn bind(config: &Config) -> Result<(SocketAddr, TcpListener), ServeError> {
    let listen = |address: SocketAddr| {
        TcpListener::bind(address).map_err(|source| ServeError::Listen { address, source })
    };
    let admin = listen(config.admin)?;
    let native = listen(config.native)?;
    let address = native.local_addr().map_err(|source| ServeError::Listen {
        address: config.native,
        source,
    })?;
    Ok((address, admin))
}

fn random(what: &'static str) -> Result<[u8; 16], ServeError> {
    random_id().map_err(|source| ServeError::Io { what, source })
}

/// Opens the metadata, checks that they and the directory belong together, and counts this start.
fn open_metadata(data: &DataDir, config: &Config) -> Result<(Catalog<Embedded>, Boot), ServeError> {
    let identity = data.identity(config.node_id)?;
    let existed = data.metadata().exists();
    let mut store = Embedded::open(&data.metadata())?;
    let known = cluster_id(&store)?;
    match (&identity, known) {
        (Some(meta), Some(cluster)) if meta.cluster_id != cluster => {
            return Err(data.foreign_metadata().into());
        }
        (Some(_), None) if !existed => {
            // The file was made a moment ago and holds nothing.
            drop(store);
            let _ = std::fs::remove_file(data.metadata());
            return Err(data.lost_metadata().into());
        }
        (Some(_), None) => return Err(data.lost_metadata().into()),
        _ => {}
    }
    let boot = boot(&mut store, random("making a cluster id")?, now().wall_ms)?;
    if identity.is_none() {
        data.set_identity(&NodeMeta {
            cluster_id: boot.cluster_id,
            node_id: config.node_id,
            disk_id: random("making a disk id")?,
        })?;
    }
    let catalog = Catalog::new(
        store,
        config.node_id,
        boot.epoch,
        config.topic_defaults.clone(),
        config.max_partitions_per_topic,
    );
    Ok((catalog, boot))
}

/// Raises the term of the journals, durably, before any of them is used; with another number of shards than at the
/// last start everything moves to new journals first.
fn open_journals(data: &DataDir, config: &Config, shards: u16) -> Result<JournalSet, ServeError> {
    let shard = ShardId(0);
    let mut disk =
        Reactor::new(&RingConfig::new(data.path())).map_err(|source| ServeError::Ring { shard, source })?;
    let template = store_config(config, shard);
    open_set(&mut disk, &template, shards, now()).map_err(|source| ServeError::Recover { shard, source })
}

fn node_info(config: &Config, native: SocketAddr, shards: u16, boot: &Boot) -> NodeInfo {
    let advertised = config.advertised_native.clone().unwrap_or_else(|| HostPort {
        host: own_host(native),
        port: native.port(),
    });
    NodeInfo {
        cluster: ClusterId(boot.cluster_id),
        node: NodeId(config.node_id),
        generation: u64::from(boot.epoch.0),
        host: advertised.host,
        port: advertised.port,
        shards,
    }
}

/// What clients dial when nothing is advertised: the listener's address, or this host's name for all addresses.
fn own_host(native: SocketAddr) -> String {
    if !native.ip().is_unspecified() {
        return native.ip().to_string();
    }
    match std::fs::read_to_string("/proc/sys/kernel/hostname") {
        Ok(name) if !name.trim().is_empty() => name.trim().to_owned(),
        _ => "localhost".to_owned(),
    }
}

fn store_config(config: &Config, shard: ShardId) -> StoreConfig {
    let mut store = StoreConfig::new(config.node_id, shard);
    store.linger_ns = config.linger_us.saturating_mul(1000);
    store.delete_delay_ms = config.delete_delay_ms;
    store.epoch_entries = config.epoch_entries;
    if let Some(bytes) = config.journal_bytes {
        // A file holds eight batches of the largest size; few large files rather than many that are too small for one.
        let wanted = 8 * (config.topic_defaults.max_message_bytes as u64 + JOURNAL_STEP);
        let files = (bytes / wanted).clamp(FEWEST_JOURNAL_FILES, store.journal_files as u64);
        store.journal_files = files as usize;
        store.journal_file_bytes = (bytes / files / JOURNAL_STEP * JOURNAL_STEP).max(JOURNAL_STEP);
        store.checkpoint_bytes = store.checkpoint_bytes.min(bytes / 4);
    }
    if let Some(bytes) = config.memory_bytes {
        store.memory_bytes = bytes;
        store.dirty_bytes = bytes / 8 * 3;
    }
    store
}

fn spawn(
    name: String,
    news: Sender<ThreadNews>,
    body: impl FnOnce() -> Result<(), ServeError> + Send + 'static,
) -> Result<(), ServeError> {
    let thread = move || {
        let name = thread::current().name().unwrap_or_default().to_owned();
        let result = catch_unwind(AssertUnwindSafe(body))
            .unwrap_or_else(|panic| Err(Fatal::Panic(format!("{name}: {}", panic_text(&*panic))).into()));
        // Nobody listens only when the process is ending already.
        let _ = news.send(ThreadNews::Ended(name, result));
    };
    thread::Builder::new()
        .name(name)
        .spawn(thread)
        .map(drop)
        .map_err(|source| ServeError::Io {
            what: "starting a thread",
            source,
        })
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

struct ShardSetup {
    id: ShardId,
    core: usize,
    ring: RingConfig,
    store: StoreConfig,
    node: NodeInfo,
    limits: crate::config::Limits,
    endpoint: Endpoint<Post>,
    stats: Arc<ShardStats>,
}

/// A shard's thread.
fn run_shard(setup: ShardSetup, news: &Sender<ThreadNews>) -> Result<(), ServeError> {
    let id = setup.id;
    affinity::set_thread_affinity([setup.core]).map_err(|error| ServeError::Cores(error.to_string()))?;
    let mut reactor = Reactor::new(&setup.ring).map_err(|source| ServeError::Ring { shard: id, source })?;
    reactor.attach(&setup.endpoint);
    let (store, report) = Store::recover(&mut reactor, setup.store, now())
        .map_err(|source| ServeError::Recover { shard: id, source })?;
    let shards = usize::from(setup.node.shards);
    let mut driver = Driver {
        shard: Shard::new(id, setup.node, setup.limits, store, setup.stats),
        reactor,
        outgoing: Outgoing::new(shards + 1),
        endpoint: setup.endpoint,
        control: shards,
        out: Outbox::default(),
    };
    if news.send(ThreadNews::Recovered(id, report)).is_err() {
        return Ok(());
    }
    let result = driver.run();
    driver.endpoint_send_end();
    result.map_err(|error| Fatal::Ring(format!("shard {id}: {error}")).into())
}

/// Drives one shard: its ring, its mailbox, its machine.
struct Driver {
    shard: Shard,
    reactor: Reactor,
    endpoint: Endpoint<Post>,
    outgoing: Outgoing,
    /// The control thread's corner of the mesh.
    control: usize,
    out: Outbox,
}

impl Driver {
    fn run(&mut self) -> Result<(), RingError> {
        while !self.shard.is_stopped() {
            let mut mail = false;
            let (shard, out) = (&mut self.shard, &mut self.out);
            let mut wake = shard.next_wake();
            if self.outgoing.is_waiting() {
                let retry = now().mono.saturating_add(RETRY);
                wake = Some(wake.map_or(retry, |wake| wake.min(retry)));
            }
            self.reactor.turn(wake, &mut |event| match event {
                IoEvent::Disk(completion) => shard.step(now(), Event::Disk(completion), out),
                IoEvent::Net(event) => shard.step(now(), Event::Net(event), out),
                IoEvent::Mail => mail = true,
            })?;
            if mail {
                self.read_mail();
            }
            let now = now();
            if self.shard.next_wake().is_some_and(|due| due <= now.mono) {
                self.shard.step(now, Event::Tick, &mut self.out);
            }
            self.shard.turn_end(now, &mut self.out);
            self.flush();
        }
        Ok(())
    }

    fn read_mail(&mut self) {
        let mut posts = Vec::new();
        self.endpoint.drain(|from, post| posts.push((from, post)));
        for (from, post) in posts {
            let from = match from == self.control {
                true => Peer::Control,
                false => Peer::Shard(ShardId(from as u16)),
            };
            match post {
                Post::Mail(mail) => self.shard.step(now(), Event::Mail { from, mail }, &mut self.out),
                Post::Listen(address) => {
                    let result = self.reactor.listen(address).map(drop);
                    self.outgoing
                        .send(&mut self.endpoint, self.control, Post::Listening(result));
                }
                Post::StopListening => self.reactor.stop_listening(),
                Post::Listening(_) | Post::Ended => {}
            }
        }
    }

    /// Hands everything the machine decided to the ring and the mailboxes.
    fn flush(&mut self) {
        for (op, disk_op) in self.out.disk.ops.drain(..) {
            self.reactor.submit_disk(op, disk_op);
        }
        for op in self.out.net.drain(..) {
            self.reactor.submit_net(op);
        }
        self.outgoing.flush(&mut self.endpoint);
        for (peer, mail) in self.out.mail.drain(..) {
            let to = match peer {
                Peer::Shard(shard) => usize::from(shard.0),
                Peer::Control => self.control,
            };
            self.outgoing.send(&mut self.endpoint, to, Post::Mail(mail));
        }
    }

    /// Tells control that this thread ends, after everything else.
    fn endpoint_send_end(&mut self) {
        self.outgoing.send(&mut self.endpoint, self.control, Post::Ended);
        while self.outgoing.is_waiting() {
            thread::yield_now();
            self.outgoing.flush(&mut self.endpoint);
        }
        // The wake rides on the ring's next submission.
        let _ = self.reactor.turn(Some(0), &mut |_| {});
    }
}
