//! The control thread: one tokio-uring runtime for metadata, topic administration, admin HTTP and signals.
//!
//! It drives the [`desk`]: mail of shards in, orders out. Metadata commits block it for the milliseconds of a synced
//! write; nothing on the data path waits for it but administration.

mod desk;

use std::fs::File;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringfence_engine::io::mailbox::Endpoint;
use ringfence_engine::io::uring::now;
use ringfence_engine::types::{LeaderEpoch, ShardId};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, oneshot};

use super::http::{self, Health};
use super::runtime::{Outgoing, Post, ServeError};
use crate::event::{Mail, Order};
use crate::metadata::catalog::Catalog;
use crate::metadata::embedded::Embedded;
use crate::shard::NodeInfo;
use crate::stats::ShardStats;
use desk::{Desk, Orders};

/// How often mail that found a full mailbox is tried again.
const RETRY: Duration = Duration::from_millis(1);

/// What the control thread starts with.
pub(super) struct Setup {
    pub(super) catalog: Catalog<Embedded>,
    pub(super) node: NodeInfo,
    pub(super) epoch: LeaderEpoch,
    pub(super) default_partitions: u32,
    pub(super) endpoint: Endpoint<Post>,
    pub(super) stats: Vec<Arc<ShardStats>>,
    /// Where shards shall listen.
    pub(super) native: SocketAddr,
    /// Bound already.
    pub(super) admin: std::net::TcpListener,
    /// Comes when every shard has recovered.
    pub(super) recovered: oneshot::Receiver<()>,
}

/// Runs the control thread until every shard has ended.
///
/// # Errors
/// When the metadata cannot be read, a shard cannot listen, or the runtime's own set-up fails.
pub(super) fn run(setup: Setup) -> Result<(), ServeError> {
    tokio_uring::start(Control::run(setup))
}

/// How far the node is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Shards take their topics over.
    Opening,
    /// Shards bind their listeners; how many are missing.
    Listening(u16),
    /// Serving.
    Ready,
    /// Shards end.
    Stopping,
}

struct Control {
    desk: Desk<Embedded>,
    node: NodeInfo,
    native: SocketAddr,
    admin: SocketAddr,
    endpoint: Endpoint<Post>,
    outgoing: Outgoing,
    health: Rc<Health>,
    phase: Phase,
    /// Shards whose thread has not ended.
    alive: u16,
}

impl Control {
    async fn run(setup: Setup) -> Result<(), ServeError> {
        let io = |what: &'static str| move |source| ServeError::Io { what, source };
        let mut terminate = signal(SignalKind::terminate()).map_err(io("waiting for SIGTERM"))?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(io("waiting for SIGINT"))?;
        let health = Rc::new(Health::new(setup.stats));
        let admin = setup
            .admin
            .local_addr()
            .map_err(io("asking for the admin address"))?;
        let listener = tokio_uring::net::TcpListener::from_std(setup.admin);
        tokio_uring::spawn(http::serve(listener, Rc::clone(&health)));
        let rung = watch_bell(&setup.endpoint).map_err(io("watching the mailbox"))?;
        // A closed channel means that the process is on its way down.
        if setup.recovered.await.is_err() {
            return Ok(());
        }
        let shards = setup.node.shards;
        let mut control = Control {
            desk: Desk::new(
                setup.catalog,
                setup.node.clone(),
                setup.epoch,
                setup.default_partitions,
            ),
            node: setup.node,
            native: setup.native,
            admin,
            outgoing: Outgoing::new(usize::from(shards) + 1),
            endpoint: setup.endpoint,
            health,
            phase: Phase::Opening,
            alive: shards,
        };
        let mut orders = Orders::new();
        control.desk.start(&mut orders)?;
        control.send(orders);
        while control.alive > 0 {
            if control.endpoint.begin_wait() {
                let retry = control.outgoing.is_waiting();
                tokio::select! {
                    () = rung.notified() => {}
                    _ = terminate.recv() => control.stop("SIGTERM"),
                    _ = interrupt.recv() => control.stop("SIGINT"),
                    () = tokio::time::sleep(RETRY), if retry => {}
                }
            }
            control.endpoint.end_wait();
            control.turn()?;
        }
        Ok(())
    }

    fn turn(&mut self) -> Result<(), ServeError> {
        let mut posts = Vec::new();
        self.endpoint
            .drain(|from, post| posts.push((ShardId(from as u16), post)));
        let mut orders = Orders::new();
        for (shard, post) in posts {
            match post {
                Post::Mail(Mail::News(news)) => {
                    let id = random_id().map_err(|source| ServeError::Io {
                        what: "reading random bytes",
                        source,
                    })?;
                    self.desk.on_news(shard, news, id, now().wall_ms, &mut orders);
                }
                Post::Listening(result) => self.on_listening(result)?,
                Post::Ended => self.alive -= 1,
                Post::Mail(mail) => tracing::error!(?mail, "mail for shards sent to control"),
                Post::Listen(_) | Post::StopListening => {}
            }
        }
        self.send(orders);
        if self.phase == Phase::Opening && self.desk.is_serving() {
            self.phase = Phase::Listening(self.node.shards);
            for shard in 0..usize::from(self.node.shards) {
                self.outgoing
                    .send(&mut self.endpoint, shard, Post::Listen(self.native));
            }
        }
        if self.phase == Phase::Ready
            && let Some(why) = self.desk.unhealthy()
        {
            self.health.not_ready(why);
        }
        self.outgoing.flush(&mut self.endpoint);
        Ok(())
    }

    fn send(&mut self, orders: Orders) {
        for (shard, order) in orders {
            let post = Post::Mail(Mail::Order(order));
            self.outgoing.send(&mut self.endpoint, usize::from(shard.0), post);
        }
    }

    fn on_listening(&mut self, result: Result<(), std::io::Error>) -> Result<(), ServeError> {
        result.map_err(|source| ServeError::Listen {
            address: self.native,
            source,
        })?;
        if let Phase::Listening(left) = self.phase {
            self.phase = match left {
                1 => {
                    self.announce();
                    Phase::Ready
                }
                _ => Phase::Listening(left - 1),
            };
        }
        Ok(())
    }

    fn announce(&self) {
        self.health.ready();
        let (node, shards) = (self.node.node, self.node.shards);
        let (native, admin) = (self.native, self.admin);
        tracing::info!(%node, shards, %native, %admin, "ready");
        println!("ringfence node {node} is ready: native {native}, admin http://{admin}, {shards} shard(s)");
    }

    fn stop(&mut self, why: &str) {
        if self.phase == Phase::Stopping {
            return;
        }
        tracing::info!(why, "stopping");
        self.phase = Phase::Stopping;
        self.health.not_ready("stopping");
        for shard in 0..usize::from(self.node.shards) {
            self.outgoing.send(&mut self.endpoint, shard, Post::StopListening);
            self.outgoing
                .send(&mut self.endpoint, shard, Post::Mail(Mail::Order(Order::Stop)));
        }
    }
}

/// Turns rings of the mailbox's bell into notifications.
fn watch_bell(endpoint: &Endpoint<Post>) -> std::io::Result<Rc<Notify>> {
    let event = File::from(endpoint.event().try_clone_to_owned()?);
    let event = tokio_uring::fs::File::from_std(event);
    let rung = Rc::new(Notify::new());
    let notify = Rc::clone(&rung);
    tokio_uring::spawn(async move {
        loop {
            let (result, _) = event.read_at(Vec::with_capacity(8), 0).await;
            if let Err(error) = result {
                tracing::error!(%error, "the control thread's bell cannot be read");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            notify.notify_one();
        }
    });
    Ok(rung)
}

/// Sixteen random bytes of the kernel.
pub(super) fn random_id() -> std::io::Result<[u8; 16]> {
    let mut id = [0; 16];
    while id == [0; 16] {
        rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(id)
}
