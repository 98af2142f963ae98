"""What reports/collectives.md says of the model beside its tables."""

NOTES = """## What is in the model

NCCL's choice is made by NCCL's own estimates, which know nothing of the figures below: the tables and formulas of the
release a sweep was made with (`sim/network/tuner.yaml`, read in NCCL 2.29.7 and in the binaries of 2.4 to 2.30), the
channels and speeds of its graph search (`sim/network/nccl/search.py`). What the choice takes is another matter: base +
steps + what the pipeline adds + bytes over the slowest link, at the rate of the channels the call opens. Fitted
figures start at NCCL's constants or a datasheet and are shrunk towards them; members without data follow their family.
Families that describe NCCL itself are wide as a whole and narrow between members, so that a site left out gets them
from the others; what belongs to a fabric stays with the fabric.

* A call opens one channel per full 4 KiB and rank (LL rings), 5 KiB (LL128) or 32 KiB (Simple): NCCL's thread
  thresholds. In LL what the 512 threads of a channel take at once is within its steps, so time is flat until all
  channels are open: a channel then moves 3.7, 4.0, 6.6 GB/s on V100, A100, H100 (NCCL's limits: 3.3, 3.6, 5.9).
* A Simple ring passes chunks on in two slices: while one is awaited the other moves, so a step takes the longer of two
  slices' work and one slice with the hop's latency. Alone it follows vTrain's four tables of V100 within 0.4 %. It
  took the place of six figures (what a ring adds once slices are full, per generation; from which size; between
  nodes).
* Two A100 read from one another where other GPUs write (compute capability 8.0, `ncclTopoCheckP2p`): a step takes 10
  us where it takes 6 on V100 and H100. One figure for reads, one for writes; Blackwell, which writes, takes 10 too and
  has one of its own (eight B200 gather 16 MiB in 102 us, where LL128 would take 55): why is not known.
* A ring of n ranks sends n - 1 times a pass and works n times: the last time a rank copies what came out of its
  buffer, or adds to it, and its link waits. So gathers, all-reduces and reduce-scatters of 2, 4 and 8 GPUs follow one
  rate of the link and one of the block (22, 39, 46 GB/s a channel on A100, H100, B200; NCCL counts 24, 38.7, 70 at
  most) within 1 to 2 % where sizes are large. It took the place of a share that pairs of GPUs were given.
* In an all-to-all half of a block's warps send and half receive, and a rank's own part has its channels: 332, 487 and
  563 GB/s on 2, 4 and 8 B200 are 16, 24 and 28 channels of 20 each. A start of its own (12 us) stands in the place
  of the ring's start and step.
* What starts take is told by generation: 8, 5.8 and 8.3 us in LL on A100, H100 and Blackwell.
* NVLink SHARP adds no bytes: AIConfigurator's all-reduces in int8 on 8 H100 stay rings, 352 where halves reach 445
  GB/s.
* NCCL 2.29.2 counts 34.5 GB/s a channel for LL128 on Blackwell, 2.27.5, 2.29.7 and 2.30.7 count 40 (2.27.5's from
  where its sweeps bend, the others' read in the binaries): eight B200 leave LL at 16 instead of 8 MiB. Found from the
  sweeps' bends, which asked for 32.6 to 34.6, then read.
* Sums by an engine's own kernel: one shot takes a start whatever it sums, two shots read the slices of one peer after
  another, a trip each; what blocks have in flight to one peer (150 to 270 GB/s) bounds both. Three figures a
  generation, in the place of NCCL's LL: twice too slow before (30 to 76 % off, now 2 to 9 %).
* A ring of N nodes has N edges between nodes: a chunk of an all-reduce crosses 2 N times, of a gather N times (NCCL
  2.12 to 2.17 count 2 N, others 2 (N - 1), which is how they choose). Counted as 2 (N - 1) before, rings of two nodes
  had made fabrics look twice as slow as trees showed them.
* Before Hopper what arrives in Simple is flushed by a read of its own out of the GPU, which crosses no fabric: some 13
  us by libfabric; 4 by verbs are assumed.
* A tree passes whole chunks on (`candidate.Chunks`): the first pays a thread block's pass at each rank and a NIC's,
  twice where a node has two children, the rest follow behind it. How large they are is NCCL's: 512 KiB a channel from
  2.20 on, so that 256 Slingshot nodes take 2.3 ms longer than their bytes from 2 MiB on; halved where there are few up
  to 2.19 (compares in the binaries); 64 or 128 KiB a channel and head for NVLSTree. In LL a chunk waits between nodes
  until the proxy has looked through it, at NCCL's limit of LL by CPU. Took the place of three fitted ramps.
* The proxy beside a NIC passes the messages of its channels in turn; where a plugin passes them to libfabric, those
  beyond 8 KiB take a rendezvous. NCCL's own transports know none. Eight are on the way at once in LL; a slice of
  Simple takes two of a connection's eight slots, so there it is four, and a full chunk is two: a ring of two Slingshot
  nodes waits for 10 of 14 (gather) or 24 of 28, at least 250 and 600 us from 2 MiB on (measured 250 to 280, 560 to
  760; with eight slots 160 and 310 were predicted). A root's ring passes a chunk once over an edge and waits for none.
* EFA's cards have generations: p3dn and p4d the first, p5 the second (EC2's pages, recalled). Fitted apart, p3dn gave
  60 us a hop and p4d 53, p5 29: the first two are one family, so that either tells the other. Where it begins (35) is
  the plugin's; how little the two may differ (`between` 0.07) was set with these values known, so what leaving p4d out
  gains by it is no blind figure.
* An all-to-all serves a node's peers at once, up to eight a channel (warps of one block, `sendrecv.h`), in one step;
  each peer has its share of the channels and receivers copy a last chunk of 512 KiB on each out of their buffers. The
  proxy passes messages to and from peers of other nodes one by one, beginning while the kernel starts.
* Slingshot's provider writes messages of up to 192 bytes into its command queue and copies them out of the GPU first
  (libfabric 2.1.0, `cxip_send_buf_init`): 13 us for each, on two nodes (4 peers) as on 256 (1020).
* AWS's plugin brings a tuner to p5 that counts with 20 us a hop (its default, recalled) where NCCL is told 75.
* A sender's kernel is through when its buffers (4 MiB a channel) hold what it sends; vidur timed that one: a send over
  an NVLink bridge "moves" 15 MB in 44 us, 339 GB/s over twelve links of 25. The rate of a lone send rests on NCCL's
  issue 1264 alone since.
* One channel is one thread block: 26.5, 24, 38.7, 70 GB/s in Simple on V100, A100, H100, B200, NCCL's own limits of a
  tree's channel. No sweep with NCCL's own number of channels reaches them (11, 10, 16 to 25, 23); with
  `nccl.channels` forced they decide, as do one link of a mesh and one NIC of a node.
* Small sends inside a node go in LL (16 KiB a peer); over a network LL has no buffers.
* Between two nodes a tree crosses once, as NVLSTree does.

## What it rests on, and where it is weak

* Priors without an independent source (`no prior figure`, `assumed` in `data/nccl_priors.yaml`: message_us,
  rendezvous, fabric_us outside EFA, exchange_share, p2p_net_us) were written down by people who had seen the sweeps,
  and how far a family as a whole may move was chosen with the left-out errors in sight. The left-out errors are
  therefore somewhat better than a blind fit would give. How far members differ from their family is estimated where
  two or more are determined (15 families), judged elsewhere.
* The 90th percentile on one node is set by vidur's sweeps, which have rows their source calls noise. Kernel durations
  below 2 MiB jump between 10 and 60 us (waits for late ranks), on the four A100-PCIe they stay at 60. None of it can
  be predicted; all of it counts in the table above. Waiting only adds, so rows that no larger call of a sweep
  undercuts (`noise_waits`) are fitted: 10, 16 and 25 us on 2, 4 and 8 A100 are the only ones that show a step of their
  LL inside a node. Without them any step between 0.7 and 1.4 us fits all others as well (loss 142.4 to 142.7), which
  is why vidur's own sweeps are worse left out than before (90th percentile on one node 22.8 to 25.6 %).
* What leaving a site out costs is mostly what only that site shows (table by site). Slingshot: 16 of the 25 sweeps of
  several nodes are Polaris, so the two figures for several nodes with the site left out say how good the priors of
  Slingshot are (6, 8, 0.7 and 0.8 against 8.0, 9.8, 0.56 and 0.75). EFA: three sites, of two generations of cards.
* AIConfigurator's sweeps: all-to-alls in LL on eight GPUs are 10 to 25 % too fast (a microsecond more for each
  doubling of the GPUs, which nothing read explains), those of A100 and of H100 with 2.23 from 1 to 4 MiB up to 35 %
  (they jump back at 8 MiB); LL from 1 to 2 MiB on eight H100 and B200 10 to 20 % too slow, a gather's in LL on two
  GPUs at 4 MiB 25 % too fast. L40S on two GPUs move 20 GB/s where gen 4 is taken to give 24; on four and eight they
  move 5 and 1.4 and are predicted at 23 and 12: not fitted beyond 4 KiB (64 KiB on two). Small
  calls of theirs take 6 us where generation ampere, which stands for Ada too, has 8. Reductions of bytes cost a block
  3 to 5 % more than of halves (two GPUs 7 to 13 %): no figure. The releases behind 2.23's files are the folder's word.
* Engines sum in other ways since (`network/sums.yaml`): pushed in one shot (SGLang 0.5.14, TensorRT-LLM, FlashInfer's
  under vLLM: a start without flags, 2.8 us on Hopper and 4.4 on Blackwell where reading starts in 4.6 and 7.2, then
  links at 82 to 84 %, on A100 70), in two shots that spread, through a buffer, or by multicast between copies. Taken
  for vLLM's first kernel they were 21 to 95 % off (median of sizes, mostly slow), now 3 to 9 %. Of the trips that
  two shots wait for, two and five, the number was settled with the sweeps seen. SGLang's push starts 10 to 25 % faster
  than TensorRT-LLM's, up to 8 KiB: one figure stands for both.
* Not modelled of TensorRT-LLM: 1.2.0rc5 goes over to two shots on four Hopper GPUs from 64 KiB (and on two at 16 and
  64 KiB), where 1.3 stays at half the time; what 1.3 does beyond one shot starts later than 1.2's two shots and is
  predicted 15 to 35 % fast. GB200 of vLLM 0.19, 0.24 and SGLang 0.5.9 start in 4.5 to 5.3 us where other runs of that
  kernel on GB200 and GB300 take 7 to 7.6, so that these are predicted 35 to 40 % slow. vLLM keeps its own kernel to 4
  MiB on B300 (1 MiB on B200, which stands for it), and one run of vLLM 0.14 on H200 went to NCCL from 256 KiB on.
* What all_reduce_bench.py measured has its host's 20 us on top of each call (`timing: event`, from its code as
  recalled): taken to be a floor before, they had made NVLink SHARP's start twice as long.
* A100's rings in Simple are not settled: 16 us of start, 9.6 a step and 5.7 a slice, or 26, 7.5 and 4.3. The latter is
  what is found where lone sends start as an all-to-all does (14 us, not the ring's start): sites of A100 and the 90th
  percentile of one node left out are then better (26.7 to 24.5 %; a sender's kernel 33 to 19), but ZeRO-3's gathers
  over many nodes become 10 % faster and its published steps worse (deepspeed_azure 6.4 to 7.6 %, sc21_paper 5.4 to
  6.0). Left off: few sweeps determine the slices of many nodes' rings.
* Where errors lie (of the fit before AIConfigurator's sweeps), mean with sign / mean without, %, latency (up to 1.5
  times a sweep's least time), between, and from 70 % of its best rate on:

  | sweeps | in sample | site left out | reason |
  |---|---|---|---|
  | Polaris 2 nodes, first setting | +12/12, +1/15, +1/2 | +17/17, +3/20, -4/5 | Slingshot's hop; a tie at 4 MiB |
  | the same, second setting | -37/41, -39/40, -1/3 | -35/40, -41/41, -6/6 | software matching: in no topology |
  | Polaris all-to-all | +4/14, -15/20, -1/5 | -14/17, -32/32, -24/24 | exchange_share, p2p_net_us, copy_us |
  | Polaris 128, 256 nodes, gather | -1/4, -1/19, +13/13 | -26/26, -10/19, +4/4 | message_us |
  | Polaris 256 nodes, all-reduce | -17/26, -3/10, +1/2 | -17/26, -5/13, +1/2 | two settings, one model |
  | p4d | +8/10, -12/16, +1/4 | +19/19, -13/17, -2/4 | 16 to 128 MiB unexplained |
  | p3dn | +5/7, -34/34, -25/25 | -3/9, -37/37, -26/26 | NCCL 2.4's trees in Simple |
  | p5 2 nodes | +11/14, -9/13, -1/4 | +1/9, -14/15, -1/4 | its tuner; 16 to 64 MiB unexplained |
  | NDR | +1/5, +4/11, 0/1 | +12/17, +10/16, +1/2 | hops: EFA's and Slingshot's set them |
  | vidur | -13/34, -11/33, 0/9 | -21/42, -13/36, 0/10 | waits |
  | A100 all-reduce of 2021 | -4/6, +1/8, +4/6 | -3/9, +7/14, +6/7 | faster from 16 to 100 MiB than NCCL 2.18's |
  | V100 on one node | 0/2, 0/5, +2/3 | -10/12, -6/8, +7/7 | LL128 and NVLink 2 of Volta |
  | H100, H200, B200 on one node | +2/9, +4/8, -1/2 | +3/11, -1/13, -2/3 | |
* Simple rings over EFA are slower from 16 to 128 MiB than the model (p4d 30 to 40 %): nothing in NCCL's code says why.
  p4d's largest sizes show a ring where NCCL's search gives trees of two nodes twice the bandwidth; the sweep is
  predicted with `algorithm: Ring`, as if its command had said so (unknown).
* p5's sweeps bend at 128 KiB, where AWS's tuner is taken to go on with trees in LL up to 256 KiB: of that tuner only
  the latency it counts with is known, NCCL's formulas stand for its own. In LL from 8 to 64 KiB p5 takes 3.5 us more
  for each further channel, as Polaris' second setting does for each message of whichever channel; on InfiniBand
  nothing of it shows. Nothing read says what channels of a node share.
* p4d's LL takes 175 us while all but one of a ring's 16 chunks are empty and 262 when none is (8 KiB); the model knows
  the latter alone. Whether it ran LL at all is not known: AWS had users, later its plugin, set NCCL_PROTO=simple
  (recalled).
* Whose CPU a machine has decides LL's limit between nodes and is taken from the GPU's generation and the fabric.
* The host of a benchmark (one process driving eight GPUs, launches in groups) is a property of the sweep, applied to
  predictions that are compared with it and to nothing else. The column "without the host" shows what it is worth.
* Eight A100 at 32 to 64 MiB differ by 25 % between sites of the same machine (vTrain and ndv4 of 2021 faster, Azure
  and vidur slower): it may be NCCL's release; two sites on each side do not show which.
* Polaris was measured under two software settings which differ by 20 to 200 % below 1 MiB; the model knows one fabric.
  Its all-to-all on 256 nodes with the first setting is four times slower than with the second at 1 GiB; nothing in the
  topology tells. In a ring's LL every message beyond the first eight takes 7.9 us under both settings, on two nodes
  all of them under the second (software matching) and none under the first: likely messages that find no posted
  receive.
* Broadcasts and reductions of nccl-tests run into one another (a root does not wait), so their sweeps show no latency.
* Tried and not taken: LL128 over EFA on p5 (no gain); LL for small sends between nodes (all-to-all on Polaris 12 to 17
  %; NCCL does not do it); two microseconds of proxy for AMD hosts (several nodes, 90th percentile 23 to 27 %);
  rendezvous by fabric (left-out errors rise); an all-to-all between nodes as the longer of messages and bytes, not
  their sum (left-out errors of Polaris rise to 27 and 38 %); the first 4 KiB of a tree's chunk in LL within the hop
  (several nodes left out 18.7 to 19.3 %); LL's passes through the proxy as a fitted figure (p5's rows of above set it,
  NDR left out 10 and 15 to 19 and 31 %); channels in turn without a rendezvous (in sample 10 to 12 %); all-to-alls by
  messages of 128 KiB in the place of exchange_share (on two Polaris nodes 11.5 GB/s a NIC from 64 KiB a peer to 1 MiB,
  no break where a second message begins); what a stream leaves between kernels taken off kernel times (the fit keeps
  its prior of 1.5 us; of the one-node sites left out, a run that was not finished had the 90th percentile at 23.7
  instead of 25.6 %); one figure for the hop of p3dn and p4d instead of a family (the rest of 6 % goes into LL's
  steps).
* Rings of many nodes on InfiniBand rest on message_us.infiniband, which only sweeps of two and four nodes determine.
* Confidence is low wherever the table of figures names no site: RoCE, TCPX, Ethernet, Gen3 and Gen5 PCIe, xGMI,
  Blackwell between nodes.
"""
