//! The producer: fills batches, sends them to the owning shards, retries without doubling or reordering.
//!
//! One lane per partition holds the rules ([`lane`]); a task per lane executes its steps. Lanes of one shard share a
//! connection, so their requests are pipelined.

mod lane;
mod receipt;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use ringfence_engine::batch::{BatchBuilder, NewRecord};
use ringfence_engine::types::{Offset, PartitionId};
use tokio::sync::Notify;

use self::lane::{Identity, Lane, LaneConfig, Outcome, Step, Ticket};
pub use self::receipt::Totals;
use self::receipt::{Budget, Receipt};
use super::{Bytes, Client, ClientError};
use crate::error::WireError;
use crate::native::{Acks, ProduceBatch, ProduceRequest, Request, Response};

/// How a producer batches and retries.
#[derive(Debug, Clone)]
pub struct ProducerConfig {
    /// When a batch counts as acknowledged. With [`Acks::None`] nothing is retried, and "stored" means "sent".
    pub acks: Acks,
    /// A batch is closed before it grows beyond this many bytes; a single record may.
    pub batch_bytes: usize,
    /// How long a batch that is not full waits for more records.
    pub linger: Duration,
    /// A batch not acknowledged this long after its first record has failed.
    pub delivery_timeout: Duration,
    /// How long the broker may wait for the acknowledgement before it answers with `RequestTimedOut`.
    pub request_timeout: Duration,
    /// Unanswered batches per partition; at most 5, which is what brokers remember to recognise repetitions.
    pub in_flight: usize,
    /// Bytes not yet acknowledged before [`Producer::send`] waits.
    pub buffer_bytes: usize,
}

impl Default for ProducerConfig {
    fn default() -> ProducerConfig {
        ProducerConfig {
            acks: Acks::All,
            batch_bytes: 256 << 10,
            linger: Duration::from_millis(5),
            delivery_timeout: Duration::from_secs(120),
            request_timeout: Duration::from_secs(30),
            in_flight: 5,
            buffer_bytes: 32 << 20,
        }
    }
}

/// Batches that a broker remembers per producer and partition.
const REMEMBERED: usize = 5;

/// A record to send.
#[derive(Debug, Clone, Copy, Default)]
pub struct OutgoingRecord<'a> {
    /// Milliseconds since 1970, or -1.
    pub timestamp: i64,
    /// The key.
    pub key: Option<&'a [u8]>,
    /// The value.
    pub value: Option<&'a [u8]>,
}

/// Where a record or batch ended up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delivered {
    /// Its partition.
    pub partition: PartitionId,
    /// Its offset (of a batch: that of its first record); `None` with [`Acks::None`].
    pub offset: Option<Offset>,
    /// When the acknowledgement arrived.
    pub at: Instant,
}

/// A record or batch on its way.
#[derive(Debug, Clone)]
pub struct Delivery {
    partition: PartitionId,
    receipt: Rc<Receipt>,
    place: u32,
}

impl Delivery {
    /// Waits for the acknowledgement.
    pub async fn wait(&self) -> Result<Delivered, ClientError> {
        let (result, at) = self.receipt.wait().await;
        let base = result?;
        Ok(Delivered {
            partition: self.partition,
            offset: base.map(|base| base.plus(u64::from(self.place))),
            at,
        })
    }
}

/// Sends records. Dropping it abandons what is not acknowledged; call [`Producer::flush`] before.
pub struct Producer {
    shared: Rc<Shared>,
    lanes: RefCell<HashMap<PartitionId, Rc<LaneHandle>>>,
    lane_config: LaneConfig,
    identity: Option<Identity>,
}

struct Shared {
    client: Client,
    config: ProducerConfig,
    budget: Rc<Budget>,
    closed: Cell<bool>,
}

struct LaneHandle {
    partition: PartitionId,
    lane: RefCell<Lane>,
    wake: Notify,
}

impl Producer {
    /// A producer with an identity of its own.
    pub async fn new(client: &Client, config: ProducerConfig) -> Result<Producer, ClientError> {
        let idempotent = config.acks != Acks::None;
        let identity = match idempotent {
            true => Some(identity(client).await?),
            false => None,
        };
        let lane_config = LaneConfig {
            in_flight: config.in_flight.clamp(1, REMEMBERED),
            batch_bytes: config.batch_bytes,
            linger: config.linger,
            delivery_timeout: config.delivery_timeout,
            idempotent,
        };
        Ok(Producer {
            shared: Rc::new(Shared {
                client: client.clone(),
                budget: Rc::new(Budget::new(config.buffer_bytes)),
                config,
                closed: Cell::new(false),
            }),
            lanes: RefCell::default(),
            lane_config,
            identity,
        })
    }

    /// Adds a record to the open batch of its partition; waits while the buffer is full. Records of a partition are
    /// stored in the order of these calls.
    pub async fn send(
        &self,
        partition: PartitionId,
        record: OutgoingRecord<'_>,
    ) -> Result<Delivery, ClientError> {
        self.shared.budget.room().await;
        let handle = self.lane(partition);
        // What a record takes beside key and value is at most about 30 bytes.
        let size = record.key.map_or(0, <[u8]>::len) + record.value.map_or(0, <[u8]>::len) + 32;
        let new = NewRecord {
            timestamp: record.timestamp,
            key: record.key,
            value: record.value,
            headers: &[],
        };
        let pushed = handle
            .lane
            .borrow_mut()
            .push(Instant::now(), new, size, || Receipt::new(&self.shared.budget));
        handle.wake.notify_one();
        let (receipt, place) = pushed.map_err(|cause| ClientError::RecordTooLarge { size, cause })?;
        Ok(Delivery {
            partition,
            receipt,
            place,
        })
    }

    /// Sends a batch as it is, behind the records sent before; waits while the buffer is full. `None` for an empty one.
    pub async fn send_batch(&self, partition: PartitionId, batch: BatchBuilder) -> Option<Delivery> {
        if batch.count() == 0 {
            return None;
        }
        self.shared.budget.room().await;
        let handle = self.lane(partition);
        let receipt = Receipt::new(&self.shared.budget);
        receipt.grow(batch.count(), batch.size());
        handle
            .lane
            .borrow_mut()
            .push_batch(Instant::now(), batch, Rc::clone(&receipt));
        handle.wake.notify_one();
        Some(Delivery {
            partition,
            receipt,
            place: 0,
        })
    }

    /// What has become of the records so far.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.shared.budget.totals()
    }

    /// Sends everything now and waits until it is acknowledged or has failed; the deliveries say which.
    pub async fn flush(&self) {
        for handle in self.lanes.borrow().values() {
            handle.lane.borrow_mut().flush();
            handle.wake.notify_one();
        }
        self.shared.budget.all_settled().await;
    }

    fn lane(&self, partition: PartitionId) -> Rc<LaneHandle> {
        let mut lanes = self.lanes.borrow_mut();
        let handle = lanes.entry(partition).or_insert_with(|| {
            let handle = Rc::new(LaneHandle {
                partition,
                lane: RefCell::new(Lane::new(self.lane_config, self.identity)),
                wake: Notify::new(),
            });
            tokio_uring::spawn(drive(Rc::clone(&self.shared), Rc::clone(&handle)));
            handle
        });
        Rc::clone(handle)
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        self.shared.closed.set(true);
        for handle in self.lanes.borrow().values() {
            handle.lane.borrow_mut().abandon();
            handle.wake.notify_one();
        }
    }
}

async fn identity(client: &Client) -> Result<Identity, ClientError> {
    let assigned = client.init_producer().await?;
    Ok(Identity {
        id: assigned.producer_id,
        epoch: assigned.producer_epoch,
    })
}

/// Executes the steps of a lane until the producer is dropped.
async fn drive(shared: Rc<Shared>, handle: Rc<LaneHandle>) {
    // The version of the topology that the last leader was taken from.
    let mut seen = 0;
    while !shared.closed.get() {
        let step = handle.lane.borrow_mut().step(Instant::now());
        match step {
            Step::Send { ticket, batch } => {
                seen = shared.client.topology().version();
                send(&shared, &handle, ticket, batch).await;
            }
            Step::Identify => match identity(&shared.client).await {
                Ok(identity) => handle.lane.borrow_mut().identify(identity),
                Err(error) => handle.lane.borrow_mut().postpone(error),
            },
            Step::Recover => match recover(&shared, handle.partition, seen).await {
                Ok(()) => handle.lane.borrow_mut().resume(),
                Err(error) => handle.lane.borrow_mut().postpone(error),
            },
            Step::Wait(until) => wait(&handle.wake, until).await,
        }
    }
}

async fn wait(wake: &Notify, until: Option<Instant>) {
    match until {
        None => wake.notified().await,
        // Either way the lane is asked again.
        Some(until) => drop(tokio::time::timeout_at(until.into(), wake.notified()).await),
    }
}

/// Finds the leader again and makes sure that it can be reached.
async fn recover(shared: &Shared, partition: PartitionId, seen: u64) -> Result<(), ClientError> {
    shared.client.refresh_topology(seen, &[]).await?;
    shared.client.leader_connection(partition).await?;
    Ok(())
}

async fn send(shared: &Shared, handle: &Rc<LaneHandle>, ticket: Ticket, batch: Bytes) {
    let (leader, connection) = match shared.client.leader_connection(handle.partition).await {
        Ok(found) => found,
        Err(error) => {
            handle.lane.borrow_mut().answered(ticket, Outcome::Again(error));
            return;
        }
    };
    let request = Request::Produce(ProduceRequest {
        acks: shared.config.acks,
        timeout_ms: u32::try_from(shared.config.request_timeout.as_millis()).unwrap_or(u32::MAX),
        batches: vec![ProduceBatch {
            partition: handle.partition,
            epoch: Some(leader.epoch),
            records: batch,
        }],
    });
    if shared.config.acks == Acks::None {
        let outcome = match connection.send_unanswered(&request) {
            Ok(()) => Outcome::Stored(None),
            Err(error) => Outcome::Refused(error),
        };
        handle.lane.borrow_mut().answered(ticket, outcome);
        return;
    }
    let handle = Rc::clone(handle);
    connection.send(
        &request,
        Box::new(move |answer| {
            let outcome = outcome(handle.partition, answer);
            handle.lane.borrow_mut().answered(ticket, outcome);
            handle.wake.notify_one();
        }),
    );
}

/// Reads the answer to a request of one batch.
fn outcome(partition: PartitionId, answer: Result<Response<Bytes>, ClientError>) -> Outcome {
    let produced = match answer {
        Ok(Response::Produce(answer)) => answer.partitions,
        Ok(Response::Refused(refusal)) => return failed(refusal.into()),
        Ok(_) => Vec::new(),
        Err(error) => return Outcome::Again(error),
    };
    match produced.as_slice() {
        [one] if one.partition == partition => match one.error {
            None => Outcome::Stored(one.base_offset),
            Some(error) => failed(ClientError::refused(error, &one.message)),
        },
        // Whether the batch is stored is unknown; it can be sent again.
        _ => Outcome::Again(ClientError::refused(
            WireError::UnknownServerError,
            "the answer does not fit the request",
        )),
    }
}

fn failed(error: ClientError) -> Outcome {
    match error.wire() {
        Some(WireError::OutOfOrderSequenceNumber) => Outcome::Gap(error),
        Some(wire) if wire.retriable() => Outcome::Again(error),
        _ => Outcome::Refused(error),
    }
}
