//! The control thread's decisions: topic administration, producer ids, reports, readiness.
//!
//! Plain code: news of shards in, orders to shards out. Every change is durable in the metadata before a shard hears
//! of it, and every answer waits until each shard has made its part durable.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use ringfence_engine::error::{CommandError, FenceReason};
use ringfence_engine::io::buf::BufSlice;
use ringfence_engine::types::{LeaderEpoch, PartitionId, ShardId, TopicId};

use crate::config::TopicConfig;
use crate::error::WireError;
use crate::event::{News, Order};
use crate::metadata::catalog::{Catalog, NewTopic, Topic, TopicError};
use crate::metadata::{MetadataError, MetadataStore};
use crate::native::{
    AlterTopic, ClusterInfo, CreateTopic, DeleteTopic, PartitionStanding, Refusal, Request, Response,
    ShardStanding, TopicCreated, TopicDescription, TopicListed, TopicName, TopicSetting,
};
use crate::shard::{NodeInfo, broker_info, partition_infos};

/// A request at a shard that waits for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Asker {
    shard: ShardId,
    call: u64,
}

/// What is done when every shard has answered an order.
#[derive(Debug)]
enum Job {
    /// The start: topics are served, old drops done.
    Start,
    /// A request is answered.
    Answer {
        asker: Asker,
        response: Box<Response<BufSlice>>,
    },
    /// A deletion is finished: its tombstone goes; then a request, if any, is answered.
    Drop { topic: TopicId, asker: Option<Asker> },
    /// A report is put together.
    Report {
        asker: Asker,
        shards: Vec<ShardStanding>,
        partitions: Vec<PartitionStanding>,
    },
}

#[derive(Debug)]
struct Open {
    /// Shards whose answer is missing.
    left: usize,
    failed: Vec<(PartitionId, CommandError)>,
    job: Job,
}

/// The control thread's state.
#[derive(Debug)]
pub(super) struct Desk<S> {
    catalog: Catalog<S>,
    node: NodeInfo,
    epoch: LeaderEpoch,
    default_partitions: u32,
    open: HashMap<u64, Open>,
    next_token: u64,
    fenced: BTreeSet<ShardId>,
    serving: bool,
}

/// Orders to shards, in order.
pub(super) type Orders = Vec<(ShardId, Order)>;

impl<S: MetadataStore> Desk<S> {
    pub(super) fn new(
        catalog: Catalog<S>,
        node: NodeInfo,
        epoch: LeaderEpoch,
        default_partitions: u32,
    ) -> Desk<S> {
        Desk {
            catalog,
            node,
            epoch,
            default_partitions,
            open: HashMap::new(),
            next_token: 0,
            fenced: BTreeSet::new(),
            serving: false,
        }
    }

    fn shards(&self) -> impl Iterator<Item = ShardId> + use<S> {
        (0..self.node.shards).map(ShardId)
    }

    /// Opens a job that every shard takes part in.
    fn open(&mut self, job: Job) -> u64 {
        self.next_token += 1;
        let open = Open {
            left: usize::from(self.node.shards),
            failed: Vec::new(),
            job,
        };
        self.open.insert(self.next_token, open);
        self.next_token
    }

    /// The first orders: serve every topic, finish every deletion.
    ///
    /// # Errors
    /// When the metadata cannot be read.
    pub(super) fn start(&mut self, orders: &mut Orders) -> Result<(), MetadataError> {
        let topics = self.catalog.topics()?;
        let tombstones = self.catalog.tombstones()?;
        tracing::info!(
            topics = topics.len(),
            deletions = tombstones.len(),
            "metadata read"
        );
        self.order_topics(Job::Start, topics, orders);
        for (topic, partitions) in tombstones {
            self.order_drop(topic, partitions, None, orders);
        }
        Ok(())
    }

    fn order_topics(&mut self, job: Job, topics: Vec<Arc<Topic>>, orders: &mut Orders) {
        let token = self.open(job);
        let epoch = self.epoch;
        orders.extend(self.shards().map(|shard| {
            let topics = topics.clone();
            (shard, Order::Topics { token, epoch, topics })
        }));
    }

    fn order_drop(&mut self, topic: TopicId, partitions: u32, asker: Option<Asker>, orders: &mut Orders) {
        let token = self.open(Job::Drop { topic, asker });
        orders.extend(self.shards().map(|shard| {
            let order = Order::Drop {
                token,
                topic,
                partitions,
            };
            (shard, order)
        }));
    }

    /// Whether every topic of the start is served.
    pub(super) fn is_serving(&self) -> bool {
        self.serving
    }

    /// Why the node should not get traffic, if so.
    pub(super) fn unhealthy(&self) -> Option<String> {
        let first = self.fenced.first()?;
        Some(format!(
            "shard {first} is fenced: it takes no writes until the process restarts"
        ))
    }

    /// Takes news of a shard. `fresh_id` is a random id for what the news may create.
    pub(super) fn on_news(
        &mut self,
        shard: ShardId,
        news: News,
        fresh_id: [u8; 16],
        now_ms: i64,
        orders: &mut Orders,
    ) {
        match news {
            News::Admin { call, request } => {
                self.on_request(Asker { shard, call }, *request, TopicId(fresh_id), now_ms, orders);
            }
            News::Ordered { token, failed } => self.on_ordered(token, failed, orders),
            News::ProducerIdsWanted => orders.push((shard, self.producer_ids())),
            News::Report {
                token,
                shard,
                partitions,
            } => self.on_report(token, shard, partitions, orders),
            News::Fenced(reason) => self.on_fenced(shard, reason),
        }
    }

    fn on_fenced(&mut self, shard: ShardId, reason: FenceReason) {
        tracing::error!(shard = shard.0, %reason, "not ready: a shard is fenced");
        self.fenced.insert(shard);
    }

    fn producer_ids(&mut self) -> Order {
        match self.catalog.producer_block() {
            Ok(ids) => Order::ProducerIds(ids),
            Err(error) => {
                tracing::error!(%error, "no producer ids can be given out");
                Order::NoProducerIds
            }
        }
    }

    fn on_request(
        &mut self,
        asker: Asker,
        request: Request<BufSlice>,
        fresh_id: TopicId,
        now_ms: i64,
        orders: &mut Orders,
    ) {
        let result = match request {
            Request::CreateTopic(request) => self.create(asker, &request, fresh_id, now_ms, orders),
            Request::DeleteTopic(request) => self.delete(asker, &request, now_ms, orders),
            Request::AlterTopic(request) => self.alter(asker, &request, orders),
            Request::AddPartitions(request) => {
                let topic = self.catalog.add_partitions(&request.name, request.total);
                topic.map(|topic| {
                    let response = Box::new(Response::AddPartitions);
                    self.order_topics(Job::Answer { asker, response }, vec![topic], orders);
                })
            }
            Request::ListTopics => self.list().map(|response| answer(asker, response, orders)),
            Request::DescribeTopic(request) => self
                .describe(&request.name)
                .map(|response| answer(asker, response, orders)),
            Request::ClusterInfo => {
                self.order_report(asker, orders);
                Ok(())
            }
            other => {
                let refusal = Refusal::because(
                    WireError::InvalidRequest,
                    format!("{} is not served by the control thread", other.api().name()),
                );
                answer(asker, Response::Refused(refusal), orders);
                Ok(())
            }
        };
        if let Err(error) = result {
            tracing::info!(%error, "administration refused");
            answer(asker, refused(&error), orders);
        }
    }

    fn create(
        &mut self,
        asker: Asker,
        request: &CreateTopic,
        id: TopicId,
        now_ms: i64,
        orders: &mut Orders,
    ) -> Result<(), TopicError> {
        let settings = request
            .settings
            .iter()
            .map(|s| (s.key.as_str(), s.value.as_str()));
        let new = NewTopic {
            name: &request.name,
            id,
            partitions: match request.partitions {
                0 => self.default_partitions,
                count => count,
            },
            replication_factor: request.replication_factor.max(1),
            config: TopicConfig::new(settings)?,
        };
        let topic = self.catalog.create(new, now_ms, request.validate_only)?;
        if request.validate_only {
            let id = TopicId::default();
            answer(asker, Response::CreateTopic(TopicCreated { id }), orders);
            return Ok(());
        }
        tracing::info!(topic = %topic.name, %id, partitions = topic.partitions.len(), "topic created");
        let response = Box::new(Response::CreateTopic(TopicCreated { id }));
        self.order_topics(Job::Answer { asker, response }, vec![topic], orders);
        Ok(())
    }

    fn delete(
        &mut self,
        asker: Asker,
        request: &DeleteTopic,
        now_ms: i64,
        orders: &mut Orders,
    ) -> Result<(), TopicError> {
        let wanted = Some(request.id).filter(|id| *id != TopicId::default());
        let topic = self.catalog.delete(&request.name, wanted, now_ms)?;
        tracing::info!(topic = %topic.name, id = %topic.id, "topic deleted");
        self.order_drop(topic.id, topic.partitions.len() as u32, Some(asker), orders);
        Ok(())
    }

    fn alter(&mut self, asker: Asker, request: &AlterTopic, orders: &mut Orders) -> Result<(), TopicError> {
        let set = request.set.iter().map(|s| (s.key.as_str(), s.value.as_str()));
        let unset = request.unset.iter().map(String::as_str);
        let topic = self.catalog.alter(&request.name, set, unset)?;
        let response = Box::new(Response::AlterTopic);
        self.order_topics(Job::Answer { asker, response }, vec![topic], orders);
        Ok(())
    }

    fn list(&self) -> Result<Response<BufSlice>, TopicError> {
        let topics = self.catalog.topics()?;
        let listed = |topic: &Arc<Topic>| TopicListed {
            name: topic.name.clone(),
            id: topic.id,
            partitions: topic.partitions.len() as u32,
            replication_factor: topic.replication_factor,
        };
        Ok(Response::ListTopics(topics.iter().map(listed).collect()))
    }

    fn describe(&self, name: &str) -> Result<Response<BufSlice>, TopicError> {
        let topic = self.catalog.topic(name)?;
        let own: BTreeSet<&str> = topic.config.overrides().map(|(key, _)| key).collect();
        let settings = topic.config.describe(self.catalog.defaults());
        Ok(Response::DescribeTopic(TopicDescription {
            name: topic.name.clone(),
            id: topic.id,
            replication_factor: topic.replication_factor,
            settings: settings
                .into_iter()
                .map(|(key, value)| TopicSetting {
                    key: key.to_owned(),
                    value,
                    own: own.contains(key),
                })
                .collect(),
            partitions: partition_infos(&topic, self.node.shards),
        }))
    }

    fn order_report(&mut self, asker: Asker, orders: &mut Orders) {
        let token = self.open(Job::Report {
            asker,
            shards: Vec::new(),
            partitions: Vec::new(),
        });
        orders.extend(self.shards().map(|shard| (shard, Order::Report { token })));
    }

    fn on_report(
        &mut self,
        token: u64,
        standing: ShardStanding,
        standings: Vec<PartitionStanding>,
        orders: &mut Orders,
    ) {
        let Some(open) = self.open.get_mut(&token) else {
            return;
        };
        if let Job::Report {
            shards, partitions, ..
        } = &mut open.job
        {
            shards.push(standing);
            partitions.extend(standings);
        }
        self.one_less(token, orders);
    }

    fn on_ordered(&mut self, token: u64, failed: Vec<(PartitionId, CommandError)>, orders: &mut Orders) {
        if let Some(open) = self.open.get_mut(&token) {
            open.failed.extend(failed);
            self.one_less(token, orders);
        }
    }

    /// A shard answered; the last one closes the job.
    fn one_less(&mut self, token: u64, orders: &mut Orders) {
        let Some(open) = self.open.get_mut(&token) else {
            return;
        };
        open.left -= 1;
        if open.left > 0 {
            return;
        }
        let Some(open) = self.open.remove(&token) else {
            return;
        };
        for (partition, error) in &open.failed {
            tracing::error!(%partition, %error, "a partition does not follow its order");
        }
        self.close(open, orders);
    }

    fn close(&mut self, open: Open, orders: &mut Orders) {
        match open.job {
            Job::Start => self.serving = true,
            Job::Answer { asker, response } => answer(asker, *response, orders),
            Job::Drop { topic, asker } => {
                if open.failed.is_empty() {
                    // Should this fail, the next start drops what is gone already and tries again.
                    if let Err(error) = self.catalog.deletion_finished(topic) {
                        tracing::error!(%topic, %error, "a finished deletion stays in the metadata");
                    }
                }
                let response = match open.failed.is_empty() {
                    true => Response::DeleteTopic,
                    false => Response::Refused(Refusal::because(
                        WireError::StorageError,
                        "the name is free; some partitions' files stay until the broker restarts",
                    )),
                };
                if let Some(asker) = asker {
                    answer(asker, response, orders);
                }
            }
            Job::Report {
                asker,
                shards,
                partitions,
            } => {
                let response = self.cluster_info(shards, partitions);
                answer(asker, response, orders);
            }
        }
    }

    fn cluster_info(
        &self,
        mut shards: Vec<ShardStanding>,
        mut partitions: Vec<PartitionStanding>,
    ) -> Response<BufSlice> {
        shards.sort_unstable_by_key(|standing| standing.shard);
        partitions.sort_unstable_by_key(|standing| standing.partition);
        let topics = match self.catalog.topics() {
            Ok(topics) => topics,
            Err(error) => return refused(&error.into()),
        };
        Response::ClusterInfo(ClusterInfo {
            cluster: self.node.cluster,
            controller: Some(self.node.node),
            brokers: vec![broker_info(&self.node)],
            topics: topics
                .iter()
                .map(|topic| TopicName {
                    id: topic.id,
                    name: topic.name.clone(),
                })
                .collect(),
            partitions,
            shards,
        })
    }
}

fn answer(asker: Asker, response: Response<BufSlice>, orders: &mut Orders) {
    let order = Order::Answer {
        call: asker.call,
        response: Box::new(response),
    };
    orders.push((asker.shard, order));
}

fn refused(error: &TopicError) -> Response<BufSlice> {
    let kind = match error {
        TopicError::Name(_) => WireError::InvalidTopic,
        TopicError::Config(_) | TopicError::MinInsync { .. } => WireError::InvalidConfig,
        TopicError::Exists(_) => WireError::TopicAlreadyExists,
        TopicError::Unknown(_) => WireError::UnknownTopicOrPartition,
        TopicError::OtherId { .. } => WireError::UnknownTopicId,
        TopicError::Partitions { .. } | TopicError::FewerPartitions { .. } => WireError::InvalidPartitions,
        TopicError::ReplicationFactor { .. } => WireError::InvalidReplicationFactor,
        TopicError::Conflict => WireError::NotController,
        TopicError::Store(_) => WireError::StorageError,
    };
    Response::Refused(Refusal::because(kind, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TopicSettings;
    use crate::metadata::catalog::boot;
    use crate::metadata::embedded::Embedded;
    use crate::native::{ClusterId, DescribeTopic, NodeId, Setting};

    const ID: [u8; 16] = [4; 16];

    struct Bench {
        desk: Desk<Embedded>,
        _dir: tempfile::TempDir,
    }

    fn bench() -> Bench {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Embedded::open(&dir.path().join("metadata.redb")).unwrap();
        let epoch = boot(&mut store, [1; 16], 0).unwrap().epoch;
        let node = NodeInfo {
            cluster: ClusterId([1; 16]),
            node: NodeId(1),
            generation: 1,
            host: "h".into(),
            port: 1,
            shards: 2,
        };
        let catalog = Catalog::new(store, 1, epoch, TopicSettings::default(), 1000);
        Bench {
            desk: Desk::new(catalog, node, epoch, 3),
            _dir: dir,
        }
    }

    impl Bench {
        fn news(&mut self, shard: u16, news: News) -> Orders {
            let mut orders = Orders::new();
            self.desk.on_news(ShardId(shard), news, ID, 7, &mut orders);
            orders
        }

        fn ask(&mut self, request: Request<BufSlice>) -> Orders {
            let request = Box::new(request);
            self.news(1, News::Admin { call: 9, request })
        }

        /// Both shards did the order; what follows from that.
        fn done(&mut self, orders: &Orders) -> Orders {
            let token = match &orders[0].1 {
                Order::Topics { token, .. } | Order::Drop { token, .. } => *token,
                other => panic!("{other:?}"),
            };
            assert_eq!(orders.len(), 2, "one order for each shard");
            let failed = Vec::new();
            assert!(
                self.news(0, News::Ordered { token, failed }).is_empty(),
                "a shard is missing"
            );
            let failed = Vec::new();
            self.news(1, News::Ordered { token, failed })
        }

        fn create(&mut self) -> Orders {
            self.ask(Request::CreateTopic(CreateTopic {
                name: "a".into(),
                partitions: 0,
                replication_factor: 0,
                settings: vec![Setting {
                    key: "retention.ms".into(),
                    value: "5".into(),
                }],
                validate_only: false,
            }))
        }
    }

    /// The answer among the orders; it must be for the call that asked.
    fn answered(orders: Orders) -> Response<BufSlice> {
        let mut answers = orders.into_iter().filter_map(|(shard, order)| match order {
            Order::Answer { call, response } => {
                assert_eq!((shard, call), (ShardId(1), 9));
                Some(*response)
            }
            _ => None,
        });
        let answer = answers.next().expect("an answer");
        assert!(answers.next().is_none());
        answer
    }

    fn refusal(response: Response<BufSlice>) -> WireError {
        match response {
            Response::Refused(refusal) => refusal.error.unwrap(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_topic_is_answered_when_every_shard_serves_it() {
        let mut bench = bench();
        let orders = bench.create();
        let answer = answered(bench.done(&orders));
        assert!(
            matches!(answer, Response::CreateTopic(TopicCreated { id: TopicId(ID) })),
            "{answer:?}"
        );
        let name = "a".to_owned();
        match answered(bench.ask(Request::DescribeTopic(DescribeTopic { name }))) {
            Response::DescribeTopic(topic) => {
                assert_eq!(topic.partitions.len(), 3);
                let own: Vec<_> = topic.settings.iter().filter(|setting| setting.own).collect();
                assert_eq!((own.len(), own[0].value.as_str()), (1, "5"));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(refusal(answered(bench.create())), WireError::TopicAlreadyExists);
    }

    #[test]
    fn a_deletion_is_answered_and_forgotten_when_every_shard_dropped_it() {
        let mut bench = bench();
        let orders = bench.create();
        bench.done(&orders);
        let delete = || {
            Request::DeleteTopic(DeleteTopic {
                name: "a".into(),
                id: TopicId::default(),
            })
        };
        let orders = bench.ask(delete());
        assert!(matches!(orders[0].1, Order::Drop { partitions: 3, .. }));
        assert_eq!(bench.desk.catalog.tombstones().unwrap().len(), 1);
        assert!(matches!(answered(bench.done(&orders)), Response::DeleteTopic));
        assert_eq!(bench.desk.catalog.tombstones().unwrap(), []);
        assert_eq!(
            refusal(answered(bench.ask(delete()))),
            WireError::UnknownTopicOrPartition
        );
    }

    #[test]
    fn a_drop_that_failed_keeps_its_tombstone_for_the_next_start() {
        let mut bench = bench();
        let orders = bench.create();
        bench.done(&orders);
        let name = "a".to_owned();
        let id = TopicId::default();
        bench.ask(Request::DeleteTopic(DeleteTopic { name, id }));
        let partition = PartitionId {
            topic: TopicId(ID),
            index: 0,
        };
        let error = CommandError::Fenced(FenceReason::JournalFailed);
        let token = bench.desk.next_token;
        let failed = vec![(partition, error)];
        assert!(bench.news(0, News::Ordered { token, failed }).is_empty());
        let failed = Vec::new();
        let answer = answered(bench.news(1, News::Ordered { token, failed }));
        assert_eq!(refusal(answer), WireError::StorageError);
        let mut orders = Orders::new();
        bench.desk.start(&mut orders).unwrap();
        let drops = orders
            .iter()
            .filter(|(_, order)| matches!(order, Order::Drop { .. }));
        assert_eq!(drops.count(), 2);
    }

    #[test]
    fn the_start_is_over_when_every_shard_took_its_topics() {
        let mut bench = bench();
        let mut orders = Orders::new();
        bench.desk.start(&mut orders).unwrap();
        assert!(!bench.desk.is_serving());
        assert!(bench.done(&orders).is_empty());
        assert!(bench.desk.is_serving());
        assert_eq!(bench.desk.unhealthy(), None);
        bench.news(1, News::Fenced(FenceReason::JournalFailed));
        assert!(bench.desk.unhealthy().unwrap().contains("shard 1"));
    }

    #[test]
    fn producer_ids_are_never_given_twice() {
        let mut bench = bench();
        let mut blocks = (0..2).map(
            |shard| match bench.news(shard, News::ProducerIdsWanted).remove(0) {
                (to, Order::ProducerIds(ids)) => {
                    assert_eq!(to, ShardId(shard));
                    ids
                }
                other => panic!("{other:?}"),
            },
        );
        let (first, second) = (blocks.next().unwrap(), blocks.next().unwrap());
        assert!(first.end <= second.start);
    }

    #[test]
    fn a_report_waits_for_every_shard() {
        let mut bench = bench();
        let orders = bench.ask(Request::ClusterInfo);
        let token = bench.desk.next_token;
        assert_eq!(orders.len(), 2);
        let report = |shard| News::Report {
            token,
            shard: ShardStanding {
                node: NodeId(1),
                shard: ShardId(shard),
                fenced: String::new(),
                figures: Vec::new(),
            },
            partitions: Vec::new(),
        };
        assert!(bench.news(1, report(1)).is_empty());
        match answered(bench.news(0, report(0))) {
            Response::ClusterInfo(info) => {
                let shards: Vec<u16> = info.shards.iter().map(|standing| standing.shard.0).collect();
                assert_eq!(shards, [0, 1]);
            }
            other => panic!("{other:?}"),
        }
    }
}
