// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/tables"
)

// Rows are the kind of rows in a placement's candidate table (package tables).
type Rows int

// The kinds of Rows.
const (
	RowsOfBuckets Rows = iota // a list of servers for each bucket
	RowsOfColumns             // a list of servers for each bucket; each column is a consistent hash of its own
	RowsOfTurns               // one server for each turn of a cycle
)

// PlacementMethod has the properties of a placement. Code outside the data path uses these
// properties, and does not compare names.
type PlacementMethod struct {
	Name    Placement
	Summary string // which server gets a new flow, for the documentation
	Rows    Rows
	// Stored is the name of the placement in generations. Placements with the same kind of candidate
	// table share a name, so a change from one to the other begins no generation.
	Stored Placement
	// Candidates is the default number of candidates. Selections have their own.
	Candidates int
	// ServersDecide tells whether the balancer offers a flow to several servers, one after the other.
	// A signal tells the balancer which server has accepted the flow. Another signal tells it that the
	// flow is over.
	ServersDecide bool
	// FollowsFlow tells whether all packets of a flow that the balancer does not know come to one
	// server, as long as no server changes.
	FollowsFlow bool
	// Selections are the valid ways to select the servers that decide, the default first.
	Selections []Selection
	// Amongs are the valid sets of servers among which prices decide, the default first. The list is
	// empty if the placement does not infer.
	Amongs []Among
	// Estimators are the valid ways to find prices, the default first. If the list is empty, a
	// placement that infers has only one way, which has the name of the placement.
	Estimators []Estimator
	// Polls tells whether the balancer asks servers for their loads.
	Polls bool
	// TakesWeights tells whether prices follow the configured weights.
	TakesWeights bool
}

// inferred are the valid sets of servers for placements whose prices the balancer finds without
// polls.
var inferred = []Among{AmongAll, AmongCandidates, AmongTwo, AmongThree, AmongFour}

// PlacementMethods are all placements, the default first.
var PlacementMethods = []PlacementMethod{
	{
		Name: PlacementHash, Summary: "the first candidate of the flow's bucket",
		Rows: RowsOfColumns, Stored: PlacementHash, Candidates: 3, FollowsFlow: true,
	},
	{
		Name: PlacementHunt, Summary: "the first server, of several that are asked in turn, that accepts",
		Rows: RowsOfBuckets, Stored: PlacementHunt, ServersDecide: true,
		Selections: []Selection{SelectConsistent, SelectRandom, SelectReports, SelectSpare},
	},
	{
		Name: PlacementRoundRobin, Summary: "the next server in turn",
		Rows: RowsOfTurns, Stored: PlacementRoundRobin, Candidates: tables.MaxCandidates,
	},
	{
		Name: PlacementInfer, Summary: "the server with the lowest score, which the balancer computes from its own flows",
		Rows: RowsOfColumns, Stored: PlacementInfer, Candidates: tables.MaxCandidates, Amongs: inferred,
		Estimators: []Estimator{
			EstimateTerritoryLearned, EstimateTerritory, EstimateHLB, EstimateHLBFixed, EstimateDurations,
			EstimateDurationsFixed, EstimateDurationsMean, EstimateHLBMean,
		},
	},
	{
		Name: PlacementLeastQueue, Summary: "the server with the fewest flows of this balancer",
		Rows: RowsOfColumns, Stored: PlacementInfer, Candidates: tables.MaxCandidates, Amongs: inferred,
	},
	{
		Name: PlacementSED, Summary: "the server with the fewest flows of this balancer per unit of `weight`",
		Rows: RowsOfColumns, Stored: PlacementInfer, Candidates: tables.MaxCandidates, Amongs: inferred,
		TakesWeights: true,
	},
	{
		Name: PlacementAWCMP, Summary: "a random server, by weights that follow polled loads",
		Rows: RowsOfColumns, Stored: PlacementInfer, Candidates: tables.MaxCandidates,
		Amongs: []Among{AmongWeighted}, Polls: true, TakesWeights: true,
	},
	{
		Name: PlacementWeightedTurns, Summary: "the next server in turn, by weights that follow polled loads",
		Rows: RowsOfColumns, Stored: PlacementInfer, Candidates: tables.MaxCandidates,
		Amongs: []Among{AmongTurns}, Polls: true, TakesWeights: true,
	},
	{
		Name: PlacementGSQ2, Summary: "the one of two random servers with the shorter polled queue",
		Rows: RowsOfColumns, Stored: PlacementInfer, Candidates: tables.MaxCandidates,
		Amongs: []Among{AmongTwo}, Polls: true, TakesWeights: true,
	},
}

// Method returns what is known of the placement. It is the zero value if no placement has the name.
func (p Placement) Method() PlacementMethod {
	return methodOf(PlacementMethods, func(m PlacementMethod) bool { return m.Name == p })
}

// Infers tells whether the placement chooses by prices that user space writes (package infer).
func (m PlacementMethod) Infers() bool { return len(m.Amongs) > 0 }

// TakesTurns tells whether servers take turns, so that a flow's bucket does not tell its server.
func (m PlacementMethod) TakesTurns() bool { return m.Rows == RowsOfTurns }

// SelectionMethod has the properties of a selection.
type SelectionMethod struct {
	Name       Selection
	Candidates int // default
	// OrdersByReports tells whether the candidates are ordered by the loads that they report.
	OrdersByReports bool
	// FollowsFlow tells whether the flow's bucket tells which server is asked first.
	FollowsFlow bool
	// NotInRow says why some selected servers may not be in the flow's row. It is empty if all are in
	// the row. A persistence that finds flows by columns requires that all are.
	NotInRow string
}

var selectionMethods = []SelectionMethod{
	{Name: SelectConsistent, Candidates: 4, FollowsFlow: true},
	{Name: SelectRandom, Candidates: 4, NotInRow: "a random server is in no column of the flow's bucket"},
	{Name: SelectReports, Candidates: tables.MaxCandidates, OrdersByReports: true, FollowsFlow: true},
	{
		Name: SelectSpare, Candidates: tables.MaxCandidates, OrdersByReports: true, FollowsFlow: true,
		NotInRow: "a server with free capacity can be in no column of the flow's bucket",
	},
}

// Method returns what is known of the selection. For an unknown name, it is that of the default
// selection.
func (s Selection) Method() SelectionMethod {
	m := methodOf(selectionMethods, func(m SelectionMethod) bool { return m.Name == s })
	if m.Name == "" {
		return selectionMethods[0]
	}
	return m
}

// AmongMethod has the properties of a set of servers among which prices decide.
type AmongMethod struct {
	Name   Among
	Choice string // how the server is chosen; a format with %d for the number of servers
	// Unless is an event that changes the choice, if it happens before the flow comes.
	Unless string
	// InRow tells whether the servers are those of the flow's row. A persistence that finds flows by
	// columns requires this.
	InRow bool
	// ByWeights tells whether weights alone decide, and no expected delay.
	ByWeights bool
}

const anotherFlow = "another new flow comes first"

var amongMethods = []AmongMethod{
	{Name: AmongAll, Choice: "lowest score of all servers (%d)", Unless: anotherFlow},
	{Name: AmongCandidates, Choice: "lowest score of the bucket's candidates (%d)", Unless: anotherFlow, InRow: true},
	{Name: AmongTwo, Choice: "lowest score of two random servers (of %d)", Unless: anotherFlow},
	{Name: AmongThree, Choice: "lowest score of three random servers (of %d)", Unless: anotherFlow},
	{Name: AmongFour, Choice: "lowest score of four random servers (of %d)", Unless: anotherFlow},
	{Name: AmongWeighted, Choice: "random by weights, of %d servers", Unless: "weights change", ByWeights: true},
	{Name: AmongTurns, Choice: "in turn by weights, of %d servers", Unless: anotherFlow, ByWeights: true},
}

// Method returns what is known of the set. It is the zero value if no set has the name.
func (a Among) Method() AmongMethod {
	return methodOf(amongMethods, func(m AmongMethod) bool { return m.Name == a })
}

// amongRow returns the value of infer.among by which the placement chooses among the servers of the
// flow's row. It is empty if the placement has no such value.
func (m PlacementMethod) amongRow() (none Among) {
	if i := slices.IndexFunc(m.Amongs, func(a Among) bool { return a.Method().InRow }); i >= 0 {
		return m.Amongs[i]
	}
	return none
}

// EstimatorMethod has the properties of an estimator.
type EstimatorMethod struct {
	Name         Estimator
	Territories  bool // each server has a home balancer and a capacity (package infer)
	TakesWeights bool // capacities are the configured weights
	// IsPrinted tells whether the estimator is HLB as it is printed.
	IsPrinted bool
	// StandsFor is the estimator of which this is a former name. It is empty for a present name.
	StandsFor Estimator
}

var estimatorMethods = []EstimatorMethod{
	{Name: EstimateTerritoryLearned, Territories: true},
	{Name: EstimateTerritory, Territories: true, TakesWeights: true},
	{Name: EstimateHLB, IsPrinted: true}, {Name: EstimateHLBFixed, IsPrinted: true},
	{Name: EstimateDurations}, {Name: EstimateDurationsFixed}, {Name: EstimateDurationsMean},
	{Name: EstimateHLBMean, StandsFor: EstimateDurationsMean},
}

// Method returns what is known of the estimator. It is the zero value if no estimator has the name.
func (e Estimator) Method() EstimatorMethod {
	return methodOf(estimatorMethods, func(m EstimatorMethod) bool { return m.Name == e })
}

// PersistenceMethod has the properties of a persistence.
type PersistenceMethod struct {
	Name    Persistence
	Summary string // how the server of a flow is found, for the documentation
	// HasFlowTable tells whether the flow table has the service's flows.
	HasFlowTable bool
	// ByColumn tells whether packets find the server of a flow by its column, that is by its place
	// in the row of the flow's bucket.
	ByColumn bool
	// HasCookies tells whether packets have the column in a cookie. Only the packets of clients with
	// TCP timestamps have one.
	HasCookies bool
	// ServersSignal tells whether servers signal each flow that they accept. With cookies, they signal
	// only flows of clients without TCP timestamps.
	ServersSignal bool
	// NeedsHints tells whether the persistence needs the hint table. Any other persistence that finds
	// flows by columns uses the hint table if there is one.
	NeedsHints bool
	// HasIDs tells whether the server issues connection IDs that name it.
	HasIDs bool
	// Generations is the default number of kept generations, and MaxGenerations the maximum.
	Generations, MaxGenerations int
	// OnDrain is the default of on-drain.
	OnDrain OnDrain
}

// PersistenceMethods are all persistences, the default first.
var PersistenceMethods = []PersistenceMethod{
	{
		Name: PersistenceTable, Summary: "a flow table remembers the server", HasFlowTable: true, ServersSignal: true,
		Generations: DefaultGenerations, MaxGenerations: MaxGenerations, OnDrain: OnDrainMoveUDP,
	},
	{
		Name: PersistenceStateless, Summary: "cookies in the packets name the server",
		ByColumn: true, HasCookies: true,
		Generations: DefaultColumnGenerations, MaxGenerations: MaxColumnGenerations, OnDrain: OnDrainMoveUDP,
	},
	{
		Name: PersistenceHint, Summary: "a small table guesses the server, and the server checks the guess",
		ByColumn: true, NeedsHints: true, ServersSignal: true,
		Generations: DefaultColumnGenerations, MaxGenerations: MaxColumnGenerations, OnDrain: OnDrainMoveUDP,
	},
	{
		Name: PersistenceQUIC, Summary: "the connection IDs of QUIC name the server", HasIDs: true,
		Generations: DefaultGenerations, MaxGenerations: MaxGenerations, OnDrain: OnDrainKeep,
	},
}

// Method returns what is known of the persistence. It is the zero value if no persistence has the
// name.
func (p Persistence) Method() PersistenceMethod {
	return methodOf(PersistenceMethods, func(m PersistenceMethod) bool { return m.Name == p })
}

// orDefault returns the placement, or the default one if m is the zero value.
func (m PlacementMethod) orDefault() PlacementMethod {
	if m.Name == "" {
		return PlacementMethods[0]
	}
	return m
}

// whyNot says why the persistence does not work with a selection. The text is empty if it works.
func (m PersistenceMethod) whyNot(selection Selection) string {
	s := selection.Method()
	switch {
	case m.ByColumn && s.NotInRow != "":
		return s.NotInRow
	case s.OrdersByReports && !m.ServersSignal:
		return "servers report their loads in signals, and send none"
	case m.HasIDs && !s.FollowsFlow:
		return "a handshake has several packets, and each would be offered to other servers"
	}
	return ""
}

// orDefault returns the persistence, or the default one if there is none of this name.
func (m PersistenceMethod) orDefault() PersistenceMethod {
	if m.Name == "" {
		return PersistenceMethods[0]
	}
	return m
}

// methodOf returns the first method that fits, or the zero value.
func methodOf[M any](methods []M, fits func(M) bool) (none M) {
	if i := slices.IndexFunc(methods, fits); i >= 0 {
		return methods[i]
	}
	return none
}

// namesOf returns the names of methods.
func namesOf[M, N any](methods []M, name func(M) N) (names []N) {
	for _, m := range methods {
		names = append(names, name(m))
	}
	return names
}

var (
	placements   = namesOf(PlacementMethods, func(m PlacementMethod) Placement { return m.Name })
	persistences = namesOf(PersistenceMethods, func(m PersistenceMethod) Persistence { return m.Name })
)

// The defaults of timeouts.closing.
const (
	defaultClosing = time.Minute // of placements that ignore the value
	// confirmedClosing is for services whose servers signal that a flow is over (6LB, section IV-C).
	confirmedClosing = 10 * time.Second
)

// closing returns the default of timeouts.closing: how long the flow table keeps a flow after its
// end.
func (m PlacementMethod) closing() time.Duration {
	if m.ServersDecide {
		return confirmedClosing
	}
	return defaultClosing
}
