//! Idempotent-producer state of a partition: who may append which sequence next, and which batch is a retry.
//!
//! Per producer id: its epoch, its last [`CACHED_BATCHES`] batches (sequences and offsets), the wall time of the last
//! one. The rules are Kafka's: the next sequence follows the last one (wrapping from `i32::MAX` to 0), a new epoch
//! starts at 0, a lower epoch is fenced, a batch equal to a cached one in epoch and sequences is a duplicate and is
//! answered with the offsets of the original.
//!
//! One rule is stricter than Kafka's: a producer id without state may only start at sequence 0. Kafka takes any
//! sequence then, which lets a retry in twice once the state has expired or was evicted. The refusal names the
//! expected sequence 0; a producer answers it by taking a new epoch or id.
//!
//! Invariants:
//! - A producer in the table has up to [`CACHED_BATCHES`] batches, contiguous in sequence, rising in offset, all of one
//!   epoch. Of a *short* one a cut took some: what it wrote before those left is in the log only, and a table with one is
//!   stale: it must be built again from the log ([`crate::rebuild`]) before a producer's batch is checked. One that has
//!   none and is not short lost them for good: its epoch is refused. A retry is never stored twice.
//! - At most `max_producers` producers; the one whose last batch lies lowest in the log goes first. That order, unlike
//!   the time, is a function of the log.
//! - [`ProducerTable::truncate`] never leaves a batch of the removed part behind.

mod codec;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use crate::batch::BatchHeader;
use crate::types::Offset;

pub use codec::{ProducersError, decode_file, encode_file};

/// Batches remembered per producer: Kafka's bound on requests in flight of an idempotent producer.
pub const CACHED_BATCHES: usize = 5;

/// `producer.id.expiration.ms`: default life of a silent producer's state.
pub const DEFAULT_EXPIRATION_MS: u64 = 24 * 60 * 60 * 1000;

/// Default bound of a partition's table.
pub const DEFAULT_MAX_PRODUCERS: usize = 1000;

/// A batch that a producer appended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProducedBatch {
    /// Sequence of its first record.
    pub first_sequence: i32,
    /// Sequence of its last record; below the first when the sequence wrapped.
    pub last_sequence: i32,
    /// Offset of its first record.
    pub base: Offset,
    /// Offset after its last record.
    pub end: Offset,
}

/// State of one producer; see the module's invariants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Producer {
    /// Epoch of its batches.
    pub epoch: i16,
    /// Wall time (milliseconds since 1970) at which its last batch was recorded.
    pub last_ms: i64,
    batches: [ProducedBatch; CACHED_BATCHES],
    cached: u8,
    /// A cut took batches of it, and what it wrote before those left is not known.
    short: bool,
}

impl Producer {
    fn new(epoch: i16) -> Producer {
        Producer {
            epoch,
            last_ms: 0,
            batches: [ProducedBatch::default(); CACHED_BATCHES],
            cached: 0,
            short: false,
        }
    }

    /// The cached batches, oldest first.
    #[must_use]
    pub fn batches(&self) -> &[ProducedBatch] {
        &self.batches[..usize::from(self.cached)]
    }

    fn push(&mut self, batch: ProducedBatch) {
        if usize::from(self.cached) == CACHED_BATCHES {
            self.batches.rotate_left(1);
            self.cached -= 1;
        }
        self.batches[usize::from(self.cached)] = batch;
        self.cached += 1;
        self.short &= usize::from(self.cached) < CACHED_BATCHES;
    }

    /// End of the last batch.
    fn end(&self) -> Offset {
        self.batches().last().map_or(Offset(0), |batch| batch.end)
    }
}

/// What to do with a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is next, or has no producer id.
    Append,
    /// It is in the log already, at these offsets. The answer waits for the original's ack condition.
    Duplicate { base: Offset, end: Offset },
    /// Its first sequence is not the expected one.
    OutOfOrder { expected: i32 },
    /// A newer instance of the producer has taken over.
    Fenced { current: i16 },
}

/// The table; see the module's invariants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProducerTable {
    producers: BTreeMap<i64, Producer>,
    /// (end of the last batch, id) of each producer: the order of eviction.
    by_end: BTreeSet<(Offset, i64)>,
    /// Producers that are short.
    short: usize,
    max_producers: usize,
}

impl Default for ProducerTable {
    fn default() -> ProducerTable {
        ProducerTable::new(DEFAULT_MAX_PRODUCERS)
    }
}

impl ProducerTable {
    /// An empty table of at most `max_producers` (at least 1) producers.
    #[must_use]
    pub fn new(max_producers: usize) -> ProducerTable {
        ProducerTable {
            producers: BTreeMap::new(),
            by_end: BTreeSet::new(),
            short: 0,
            max_producers: max_producers.max(1),
        }
    }

    /// What to do with a batch whose header passed [`crate::batch::validate`]. Changes nothing.
    #[must_use]
    pub fn check(&self, header: &BatchHeader) -> Verdict {
        if !header.has_producer() {
            return Verdict::Append;
        }
        let Some(producer) = self.producers.get(&header.producer_id) else {
            return expect_sequence(header, 0);
        };
        if header.producer_epoch < producer.epoch {
            return Verdict::Fenced {
                current: producer.epoch,
            };
        }
        if header.producer_epoch > producer.epoch {
            return expect_sequence(header, 0);
        }
        let sequences = (header.base_sequence, header.last_sequence());
        let original = producer
            .batches()
            .iter()
            .find(|batch| (batch.first_sequence, batch.last_sequence) == sequences);
        if let Some(original) = original {
            return Verdict::Duplicate {
                base: original.base,
                end: original.end,
            };
        }
        match producer.batches().last() {
            Some(last) => expect_sequence(header, next_sequence(last.last_sequence)),
            None => Verdict::OutOfOrder { expected: -1 },
        }
    }

    /// Enters a batch that was appended at `base` (or is replayed from the log) at wall time `now_ms`. A batch
    /// without producer id changes nothing.
    pub fn record(&mut self, header: &BatchHeader, base: Offset, now_ms: i64) {
        if !header.has_producer() {
            return;
        }
        let batch = ProducedBatch {
            first_sequence: header.base_sequence,
            last_sequence: header.last_sequence(),
            base,
            end: base.plus(u64::from(header.last_offset_delta) + 1),
        };
        let mut producer = match self.remove(header.producer_id) {
            Some(known) if continues(&known, header.producer_epoch, &batch) => known,
            _ => Producer::new(header.producer_epoch),
        };
        producer.push(batch);
        producer.last_ms = now_ms;
        self.insert(header.producer_id, producer);
        self.evict();
    }

    fn evict(&mut self) {
        while self.producers.len() > self.max_producers {
            let Some((_, oldest)) = self.by_end.first().copied() else {
                break;
            };
            self.remove(oldest);
        }
    }

    fn insert(&mut self, id: i64, producer: Producer) {
        self.by_end.insert((producer.end(), id));
        self.short += usize::from(producer.short);
        self.producers.insert(id, producer);
    }

    fn remove(&mut self, id: i64) -> Option<Producer> {
        let producer = self.producers.remove(&id)?;
        self.by_end.remove(&(producer.end(), id));
        self.short -= usize::from(producer.short);
        Some(producer)
    }

    /// Drops producers that were silent for `expiration_ms` at wall time `now_ms`; how many. A clock that went back
    /// expires nothing.
    pub fn expire(&mut self, now_ms: i64, expiration_ms: u64) -> usize {
        let before = self.producers.len();
        let (by_end, short) = (&mut self.by_end, &mut self.short);
        self.producers.retain(|id, producer| {
            let silent = now_ms.saturating_sub(producer.last_ms);
            let keep = u64::try_from(silent).map_or(true, |silent| silent < expiration_ms);
            if !keep {
                by_end.remove(&(producer.end(), *id));
                *short -= usize::from(producer.short);
            }
            keep
        });
        before - self.producers.len()
    }

    /// The log was cut to end at `end`: forgets every batch that reaches beyond it. A producer that lost all its cached
    /// batches, or some of a full cache, is short then: the table is stale until it is built again from the log.
    pub fn truncate(&mut self, end: Offset) {
        let cut: Vec<i64> = self
            .by_end
            .range((end, i64::MIN)..)
            .filter(|(last, _)| *last > end)
            .map(|(_, id)| *id)
            .collect();
        for id in cut {
            let Some(mut producer) = self.remove(id) else {
                continue;
            };
            let kept = producer.batches().partition_point(|batch| batch.end <= end);
            producer.short |= kept == 0 || usize::from(producer.cached) == CACHED_BATCHES;
            producer.batches[kept..].fill(ProducedBatch::default());
            // at most CACHED_BATCHES
            producer.cached = kept as u8;
            self.insert(id, producer);
        }
    }

    /// Keeps the producers of `older` that are not in this table known, without batches: what they wrote is lost, so their
    /// epoch is refused.
    pub fn keep_known(&mut self, older: &ProducerTable) {
        for (id, producer) in older.iter() {
            if !self.producers.contains_key(&id) {
                let mut known = Producer::new(producer.epoch);
                known.last_ms = producer.last_ms;
                self.insert(id, known);
            }
        }
        self.evict();
    }

    /// Whether a cut took something of which the log may still hold what came before.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        self.short > 0
    }

    /// Forgets every producer.
    pub fn clear(&mut self) {
        self.producers.clear();
        self.by_end.clear();
        self.short = 0;
    }

    /// The state of one producer.
    #[must_use]
    pub fn get(&self, producer_id: i64) -> Option<&Producer> {
        self.producers.get(&producer_id)
    }

    /// Every producer id and its state, by id.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (i64, &Producer)> {
        self.producers.iter().map(|(id, producer)| (*id, producer))
    }

    /// Number of producers.
    #[must_use]
    pub fn len(&self) -> usize {
        self.producers.len()
    }

    /// Whether no producer is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.producers.is_empty()
    }
}

/// Whether `batch` extends what is cached. Else (new epoch, or a replay that begins in the middle) the cache starts
/// anew with it.
fn continues(producer: &Producer, epoch: i16, batch: &ProducedBatch) -> bool {
    producer.epoch == epoch
        && producer.batches().last().is_none_or(|last| {
            batch.first_sequence == next_sequence(last.last_sequence) && batch.base >= last.end
        })
}

fn expect_sequence(header: &BatchHeader, expected: i32) -> Verdict {
    if header.base_sequence == expected {
        Verdict::Append
    } else {
        Verdict::OutOfOrder { expected }
    }
}

/// The sequence after `last`.
fn next_sequence(last: i32) -> i32 {
    last.checked_add(1).unwrap_or(0)
}
