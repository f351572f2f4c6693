// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/segue-lb/segue/internal/agent"
)

// Offers has the state of a hunting service on a server. It has the policy by which the server
// accepts connections. It also counts, by outcome, the connections that were offered to the server
// since its agent was attached.
type Offers struct {
	Service string `json:"service"`
	Server  string `json:"server"`
	*agent.AcceptState
}

// Offers returns the offers of each service with placement hunt on each server, in the order of the
// topology. It reads them from the data paths of the servers. It leaves out servers whose agent is
// not attached.
func (l *Lab) Offers() ([]Offers, error) {
	byServer := make(map[string]map[string]*agent.AcceptState)
	for _, spec := range l.Topology.specs(RoleServer) {
		states, err := l.Node(spec.Name).AcceptStates()
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // an agent may be detached
			return nil, fmt.Errorf("%s: %w", spec.Name, err)
		}
		byServer[spec.Name] = states
	}
	var all []Offers
	for _, s := range l.Topology.Services {
		if !s.hunts() {
			continue
		}
		for _, spec := range l.Topology.specs(RoleServer) {
			if state := byServer[spec.Name][s.Name]; state != nil {
				all = append(all, Offers{s.Name, spec.Name, state})
			}
		}
	}
	return all, nil
}

// AcceptStates returns the policy and the counts of each service of a server, by the name of the
// service. It returns fs.ErrNotExist if no agent is attached.
func (n *Node) AcceptStates() (map[string]*agent.AcceptState, error) {
	states := make(map[string]*agent.AcceptState)
	err := n.Do(func() error { // sockets are visible only in their own network namespace
		view, err := agent.OpenView(n.Instance())
		if err != nil {
			return err
		}
		defer view.Close()
		snapshot, err := view.Snapshot()
		if err != nil {
			return err
		}
		for _, s := range snapshot.Services {
			states[s.Name] = s.Accept
		}
		return nil
	})
	return states, err
}

// writeOffers prints a table of offers and an empty line. It prints nothing if there are no offers.
func writeOffers(w io.Writer, all []Offers) {
	if len(all) == 0 {
		return
	}
	table := newTable(w)
	fmt.Fprintln(table, "hunting service\tserver\tpolicy\tload\tthreshold\toffered\taccepted\trefused\t"+
		"refused down\thanded back\ttaken back\tforced\t")
	for _, o := range all {
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t\n",
			o.Service, o.Server, o.Policy, o.DescribeLoad(), o.DescribeThreshold(),
			o.Offered, o.Accepted, o.Offers["refused"],
			o.Offers["refused_down"], o.Offers["returned"], o.Offers["taken_back"], o.Offers["forced"])
	}
	table.Flush()
	fmt.Fprintln(w)
}
