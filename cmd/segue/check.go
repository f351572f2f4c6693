// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/plural"
	"github.com/segue-lb/segue/internal/runstate"
)

// newCheck returns the command that validates a configuration file and touches nothing else.
func newCheck() *cobra.Command {
	var file, role, against string
	cmd := &cobra.Command{
		Use:   "check -c FILE",
		Short: "Validate a configuration file",
		Long: `Check reads a configuration file of a balancer or an agent and prints every
problem in it, one a line, as FILE:LINE: FIELD "VALUE": PROBLEM. What is valid
but rarely meant it prints to the standard error, as warning: FILE:LINE: ...
It touches nothing on the machine, so it may run anywhere and as any user.

With --against, the file must also be one that the process which runs the
instance can take on by a reload. Check prints each field of which only a restart
can change the value. That needs root.

Without --role, a file in which a service lists servers is a balancer's, and any
other an agent's; of one that is not YAML only that is said.

The exit code is 0 if the file is valid, with or without warnings, and 1 if it
is not, or is no reload for the instance.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return check(cmd, file, role, against)
		},
	}
	configFlag(cmd, &file)
	cmd.Flags().StringVar(&role, "role", "", "`role` of the host that the file is for: lb or agent")
	cmd.Flags().StringVar(&against, "against", "",
		"`name` of a running balancer or agent that is to reload the file")
	return cmd
}

func check(cmd *cobra.Command, file, role, against string) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	hint := ""
	var read checkedFile
	if role == "" {
		role, hint, err = guessRole(data)
	}
	if err == nil {
		read, err = parseFor(role, data)
	}
	var problems config.Errors
	if errors.As(err, &problems) {
		fmt.Fprintln(cmd.OutOrStdout(), problems.In(file))
		what := strings.TrimSpace(read.kind + " configuration") // a file that is not YAML has no kind
		return fmt.Errorf("%s: no valid %s: %s%s", file, what, count(len(problems), "problem"), hint)
	}
	if err != nil {
		return err
	}
	for _, warning := range read.warnings.In(file) {
		fmt.Fprintln(cmd.ErrOrStderr(), "warning:", warning)
	}
	if against != "" {
		err = checkAgainst(against, read)
	}
	if errors.As(err, &problems) {
		fmt.Fprintln(cmd.OutOrStdout(), problems.In(file))
		return fmt.Errorf("%s: valid, but instance %q would refuse the reload: %s", file, against,
			count(len(problems), "problem"))
	}
	if err != nil {
		return err
	}
	fmt.Fprintf(cmd.OutOrStdout(), "%s: valid %s configuration: %s\n", file, read.kind, read.content)
	return nil
}

// checkedFile is what check tells of a file that is valid; of any other only the kind.
type checkedFile struct {
	kind     string // balancer or agent
	content  string // how much is in it
	warnings config.Errors
	fixed    []config.Setting
}

// parseFor reads a file for the role of a host.
func parseFor(role string, data []byte) (checkedFile, error) {
	switch role {
	case "lb":
		b, err := config.ParseBalancer(data)
		if err != nil {
			return checkedFile{kind: string(datapath.RoleBalancer)}, err
		}
		content := count(len(b.Services), "service") + ", " + count(servers(b), "server")
		return checkedFile{string(datapath.RoleBalancer), content, b.Warnings(), b.Fixed()}, nil
	case "agent":
		a, err := config.ParseAgent(data)
		if err != nil {
			return checkedFile{kind: string(datapath.RoleAgent)}, err
		}
		content := count(len(a.Services), "service")
		return checkedFile{string(datapath.RoleAgent), content, a.Warnings(), a.Fixed()}, nil
	}
	return checkedFile{}, fmt.Errorf("--role %q: must be lb or agent", role)
}

// checkAgainst compares a file with what the process of an instance runs. The error is of type
// config.Errors where the process cannot take the file on.
func checkAgainst(instance string, file checkedFile) error {
	if err := config.CheckInstance(instance); err != nil {
		return fmt.Errorf("--against: %w", err)
	}
	process, err := runstate.FindProcess(instance)
	if err != nil {
		return fmt.Errorf("--against %s: %w", instance, err)
	}
	if process == nil {
		return fmt.Errorf("--against %s: no process runs the instance", instance)
	}
	record, err := runstate.FindRecord(instance, process)
	switch {
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("--against %s (which needs root): %w", instance, err)
	case err != nil:
		return fmt.Errorf("--against %s: %w", instance, err)
	case record == nil:
		return fmt.Errorf("--against %s: process %d is of a build that does not tell what it runs; "+
			"restart it", instance, process.PID)
	case record.Role != file.kind:
		return fmt.Errorf("--against %s: the instance is of the role %s, and the file is for the role %s",
			instance, record.Role, file.kind)
	}
	return config.CheckFixed(file.fixed, record.Fixed)
}

// guessRole tells whose a file is, and why, for those who meant the other. One that is not YAML is
// nobody's.
func guessRole(data []byte) (role, hint string, err error) {
	isBalancer, err := config.HasServers(data)
	switch {
	case err != nil:
		return "", "", err
	case isBalancer:
		return "lb", " (a balancer's, for a service lists servers; --role agent if it is an agent's)", nil
	}
	return "agent", " (an agent's, for no service lists servers; --role lb if it is a balancer's)", nil
}

// servers counts a server once for each service that it is in.
func servers(b *config.Balancer) int {
	n := 0
	for _, s := range b.Services {
		n += len(s.Servers)
	}
	return n
}

func count(n int, noun string) string { return plural.Count(n, noun) }
