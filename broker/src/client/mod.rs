//! Client library for the native protocol, on a tokio-uring runtime.
//!
//! [`Client`] finds the brokers and keeps one connection per shard it talks to; [`Producer`] appends, [`Consumer`]
//! reads, and the administration of topics is on the client itself. Everything is single-threaded (`Rc`): it runs
//! inside `tokio_uring::start` and its futures are not `Send`.
//!
//! Invariants:
//! - A batch is never sent in a way that could reorder it with another batch of its partition or store it twice
//!   (`producer/lane.rs`).
//! - A consumer hands out nothing whose checksum or offset does not fit.
//! - Every wait has a deadline; every error names its cause and the next step.

mod admin;
mod bytes;
mod connection;
mod consumer;
mod error;
mod partitioner;
mod producer;
#[cfg(test)]
mod tests;
mod topology;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use ringfence_engine::types::{PartitionId, ShardId};

use crate::native::{MetadataRequest, NodeId, Request, Response, Scope};

pub use admin::NewTopic;
pub use bytes::Bytes;
pub use connection::Connection;
pub use consumer::{Consumer, ConsumerConfig, Fetched, StartAt};
pub use error::ClientError;
pub use partitioner::Partitioner;
pub use producer::{Delivered, Delivery, OutgoingRecord, Producer, ProducerConfig, Totals};
pub use topology::{Leader, Topic, Topology};

/// How a client connects and how long it keeps trying.
#[derive(Debug, Clone)]
pub struct ClientConfig {
    /// `HOST:PORT` of brokers to ask first, in order.
    pub bootstrap: Vec<String>,
    /// Name and version told to brokers, for their logs.
    pub software: String,
    /// Longest wait for a connection and its Hello.
    pub connect_timeout: Duration,
    /// How long a request that fails for a passing reason (broker restarting, no leader) is tried again.
    pub retry_deadline: Duration,
    /// Largest answer taken, in bytes.
    pub max_frame: usize,
}

impl ClientConfig {
    /// The defaults, for one bootstrap address.
    #[must_use]
    pub fn new(bootstrap: &str) -> ClientConfig {
        ClientConfig {
            bootstrap: vec![bootstrap.to_owned()],
            software: concat!("ringfence/", env!("CARGO_PKG_VERSION")).to_owned(),
            connect_timeout: Duration::from_secs(5),
            retry_deadline: Duration::from_secs(30),
            max_frame: crate::native::DEFAULT_MAX_FRAME,
        }
    }
}

/// Pause before the n-th try (from 0): 20 ms doubling to 1 s.
fn backoff(tries: u32) -> Duration {
    Duration::from_millis((20u64 << tries.min(6)).min(1000))
}

/// A cluster as seen from here. Clones share everything.
#[derive(Clone)]
pub struct Client {
    inner: Rc<Inner>,
}

struct Inner {
    config: ClientConfig,
    topology: RefCell<Topology>,
    /// Any live connection, for questions that every broker answers.
    any: RefCell<Option<Rc<Connection>>>,
    /// Connections to shards.
    shards: RefCell<HashMap<(NodeId, ShardId), Rc<Connection>>>,
    /// Held while connecting or refreshing, so that many waiters cause one connection and one question.
    connecting: tokio::sync::Mutex<()>,
    refreshing: tokio::sync::Mutex<()>,
}

impl Client {
    /// Connects to the first bootstrap address that answers. Fails at once when none does: a wrong address shall
    /// not look like a slow broker.
    pub async fn connect(config: ClientConfig) -> Result<Client, ClientError> {
        let client = Client {
            inner: Rc::new(Inner {
                config,
                topology: RefCell::default(),
                any: RefCell::default(),
                shards: RefCell::default(),
                connecting: tokio::sync::Mutex::new(()),
                refreshing: tokio::sync::Mutex::new(()),
            }),
        };
        client.any_connection().await?;
        client.refresh_topology(0, &[]).await?;
        Ok(client)
    }

    /// Settings of this client.
    #[must_use]
    pub fn config(&self) -> &ClientConfig {
        &self.inner.config
    }

    /// What is known of the cluster; may be stale.
    pub fn topology(&self) -> std::cell::Ref<'_, Topology> {
        self.inner.topology.borrow()
    }

    /// A connection to some broker: an open one, else a bootstrap address, else a broker known from before.
    pub async fn any_connection(&self) -> Result<Rc<Connection>, ClientError> {
        if let Some(connection) = self.live_any() {
            return Ok(connection);
        }
        let _one_at_a_time = self.inner.connecting.lock().await;
        if let Some(connection) = self.live_any() {
            return Ok(connection);
        }
        let mut addresses = self.inner.config.bootstrap.clone();
        addresses.extend(self.inner.topology.borrow().addresses());
        let mut failed = ClientError::NoBootstrap;
        for address in addresses {
            match Connection::open(&address, None, &self.inner.config).await {
                Ok(connection) => {
                    let connection = Rc::new(connection);
                    *self.inner.any.borrow_mut() = Some(Rc::clone(&connection));
                    return Ok(connection);
                }
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    fn live_any(&self) -> Option<Rc<Connection>> {
        let any = self.inner.any.borrow();
        any.as_ref().filter(|connection| connection.is_open()).cloned()
    }

    /// The connection to a shard of a broker; opened when there is none.
    pub async fn shard_connection(
        &self,
        node: NodeId,
        shard: ShardId,
    ) -> Result<Rc<Connection>, ClientError> {
        if let Some(connection) = self.live_shard(node, shard) {
            return Ok(connection);
        }
        let _one_at_a_time = self.inner.connecting.lock().await;
        if let Some(connection) = self.live_shard(node, shard) {
            return Ok(connection);
        }
        let address = self.inner.topology.borrow().address(node);
        let address = address.ok_or(ClientError::UnknownNode(node))?;
        let connection = Rc::new(Connection::open(&address, Some(shard), &self.inner.config).await?);
        let mut shards = self.inner.shards.borrow_mut();
        shards.insert((node, shard), Rc::clone(&connection));
        Ok(connection)
    }

    fn live_shard(&self, node: NodeId, shard: ShardId) -> Option<Rc<Connection>> {
        let shards = self.inner.shards.borrow();
        let connection = shards.get(&(node, shard))?;
        connection.is_open().then(|| Rc::clone(connection))
    }

    /// The leader of a partition and the connection to its shard.
    pub async fn leader_connection(
        &self,
        partition: PartitionId,
    ) -> Result<(Leader, Rc<Connection>), ClientError> {
        let leader = self.inner.topology.borrow().leader(partition);
        let leader = leader.ok_or(ClientError::NoLeader(partition))?;
        let connection = self.shard_connection(leader.node, leader.shard).await?;
        Ok((leader, connection))
    }

    /// A topic by name, from what is known or by asking.
    pub async fn topic(&self, name: &str) -> Result<Topic, ClientError> {
        if let Some(topic) = self.inner.topology.borrow().topic(name) {
            return Ok(topic);
        }
        let deadline = Instant::now() + self.inner.config.retry_deadline;
        self.retry(deadline, || async {
            let version = self.inner.topology.borrow().version();
            self.refresh_topology(version, &[name.to_owned()]).await?;
            let known = self.inner.topology.borrow().topic(name);
            known.ok_or_else(|| ClientError::UnknownTopic(name.to_owned()))
        })
        .await
    }

    /// Asks for the topics known here and for `more`, unless that was done since `seen` (a [`Topology::version`]).
    pub async fn refresh_topology(&self, seen: u64, more: &[String]) -> Result<(), ClientError> {
        let _one_at_a_time = self.inner.refreshing.lock().await;
        if more.is_empty() && self.inner.topology.borrow().version() > seen {
            return Ok(());
        }
        let mut names = self.inner.topology.borrow().names();
        names.extend_from_slice(more);
        names.sort_unstable();
        names.dedup();
        let request = Request::Metadata(MetadataRequest {
            scope: Scope::Listed,
            names,
            ids: Vec::new(),
        });
        let connection = self.any_connection().await?;
        match connection.request(&request).await? {
            Response::Metadata(answer) => {
                self.inner.topology.borrow_mut().learn(answer);
                Ok(())
            }
            other => Err(connection.unexpected(&other)),
        }
    }

    /// Asks any broker; tries again until the retry deadline when the reason is a passing one.
    pub(crate) async fn ask(&self, request: &Request<Bytes>) -> Result<Response<Bytes>, ClientError> {
        let deadline = Instant::now() + self.inner.config.retry_deadline;
        self.retry(deadline, || async {
            let connection = self.any_connection().await?;
            connection.request(request).await
        })
        .await
    }

    /// Runs `attempt` until it succeeds, fails for good, or the deadline is over.
    async fn retry<T, F: Future<Output = Result<T, ClientError>>>(
        &self,
        deadline: Instant,
        mut attempt: impl FnMut() -> F,
    ) -> Result<T, ClientError> {
        let mut tries = 0;
        loop {
            match attempt().await {
                Err(error) if error.retriable() => {
                    let pause = backoff(tries);
                    if Instant::now() + pause >= deadline {
                        return Err(error.gave_up(self.inner.config.retry_deadline));
                    }
                    tokio::time::sleep(pause).await;
                    tries += 1;
                }
                done => return done,
            }
        }
    }
}
