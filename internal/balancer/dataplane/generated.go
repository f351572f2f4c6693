// SPDX-License-Identifier: Apache-2.0

package dataplane

// These are exported names for the types that bpf2go generates from the headers in bpf/balancer.
// Fields have the names, units and byte orders of the headers.
type (
	// Identity contains the hash keys of an instance and the version of its tables (types.h).
	Identity = balancerIdentity
	// DirectoryLayout is the content of a Directory (directory.h).
	DirectoryLayout = balancerDirectory
	// ServiceEntry says that an address is a VIP, or how packets to a service are handled
	// (types.h).
	ServiceEntry = balancerServiceEntry
	// ServiceRule is the part of a service's entry that one store replaces.
	ServiceRule = balancerServiceRule
	// ServerFlags are the flags of a slot: what the server is used for, and its causes.
	ServerFlags = balancerServerFlags
	// Port is an interface through which packets leave.
	Port = balancerPort
	// FlowState is the state of an entry of a flow table.
	FlowState = balancerFlowState
	// SweptServer says how long a sweep keeps a server's entries, and how many it has kept
	// (sweep.bpf.c).
	SweptServer = sweeperSweptServer
	// FragmentKey and FragmentFlow are key and value of the table of first fragments (hold.h).
	FragmentKey  = balancerFragmentKey
	FragmentFlow = balancerFragmentFlow
	// Reason is the reason under which a packet is counted (stats.h).
	Reason = balancerLbReason
	// Decision is what a dry run decides about a packet, and why (decision.h).
	Decision = balancerDecision
	// DecidedPlacement is where a dry run places a packet's flow.
	DecidedPlacement = balancerDecidedPlacement
	// DecidedSegment is a server that a packet visits (decision.h).
	DecidedSegment = balancerDecidedSegment
	// Departure is why a packet leaves the server of its flow's entry (decision.h).
	Departure = balancerDeparture
	// Counter, ServerCounter and SignalCounter are counters of one CPU (stats.h).
	Counter       = balancerCounter
	ServerCounter = balancerServerCounter
	SignalCounter = balancerSignalCounter
	// QUICPrefix is how the connection IDs of a server begin (types.h).
	QUICPrefix = balancerQuicPrefix
)

// ProtocolVersion is the version of the protocol between balancers and agents
// (docs/understand/protocol.md).
const ProtocolVersion = balancerProtocolVersionPROTOCOL_VERSION

// The names of maps. Their pins have the same names.
const (
	FlowsMap          = balancerMapFlows
	FragmentsMap      = balancerMapFragments
	HintsMap          = balancerMapHints
	ReasonsMap        = balancerMapReasons
	LoadsMap          = balancerMapLoads
	ServerCountersMap = balancerMapServerCounters
	TablesMap         = balancerMapTables
)

// The states of a flow.
const (
	FlowFree        = balancerFlowStateFLOW_FREE   // the entry has no flow
	FlowSilent      = balancerFlowStateFLOW_SILENT // established, and without a packet for long
	FlowNew         = balancerFlowStateFLOW_NEW
	FlowEstablished = balancerFlowStateFLOW_ESTABLISHED
	FlowClosing     = balancerFlowStateFLOW_CLOSING // the client has sent FIN or RST
	FlowClosed      = balancerFlowStateFLOW_CLOSED  // the server has signalled the end
)

// The flags of a server (enum server_flags in types.h).
const (
	FlagInUse        = balancerServerFlagsSERVER_IN_USE
	FlagIPv4         = balancerServerFlagsSERVER_IPV4
	FlagDrained      = balancerServerFlagsSERVER_DRAINED
	FlagFailing      = balancerServerFlagsSERVER_FAILING
	FlagRouted       = balancerServerFlagsSERVER_ROUTED
	FlagUnchecked    = balancerServerFlagsSERVER_UNCHECKED
	FlagUnproven     = balancerServerFlagsSERVER_UNPROVEN
	FlagUnprobed     = balancerServerFlagsSERVER_UNPROBED
	FlagUnreachable  = balancerServerFlagsSERVER_UNREACHABLE
	FlagChecksFail   = balancerServerFlagsSERVER_CHECKS_FAIL
	FlagSilent       = balancerServerFlagsSERVER_SILENT
	FlagIncompatible = balancerServerFlagsSERVER_INCOMPATIBLE
	FlagNotServed    = balancerServerFlagsSERVER_NOT_SERVED
	FlagRefusing     = balancerServerFlagsSERVER_REFUSING
	FlagUnheard      = balancerServerFlagsSERVER_UNHEARD
	FlagStarting     = balancerServerFlagsSERVER_STARTING
	FlagLeaving      = balancerServerFlagsSERVER_LEAVING
)

// Why a packet leaves the server of its flow's entry (enum departure in decision.h).
const (
	Stays              = balancerDepartureSTAYS // it does not leave
	LeavesRemoved      = balancerDepartureLEAVES_REMOVED
	LeavesOtherService = balancerDepartureLEAVES_OTHER_SERVICE
	LeavesFailing      = balancerDepartureLEAVES_FAILING
	LeavesNoNextHop    = balancerDepartureLEAVES_NO_NEXT_HOP
	LeavesUnreachable  = balancerDepartureLEAVES_UNREACHABLE
	LeavesOver         = balancerDepartureLEAVES_OVER
	LeavesDrained      = balancerDepartureLEAVES_DRAINED
	LeavesStale        = balancerDepartureLEAVES_STALE
)

// Some of the reasons (enum lb_reason in stats.h). docs/reference/observability.md explains all of
// them.
const (
	ForwardHunt  = balancerLbReasonLB_FORWARD_HUNT
	ForwardKnown = balancerLbReasonLB_FORWARD_KNOWN
	ForwardNew   = balancerLbReasonLB_FORWARD_NEW
	ForwardReset = balancerLbReasonLB_FORWARD_RESET
)
