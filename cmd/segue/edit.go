// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"reflect"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/plural"
)

// target is a running balancer, and whether a command changes it.
type target struct {
	instance      string
	dryRun        bool
	allowRemovals bool
}

func (t *target) addFlags(cmd *cobra.Command) {
	instanceFlag(cmd, &t.instance)
	cmd.Flags().BoolVar(&t.dryRun, "dry-run", false, "show what would change, and change nothing")
}

// addRemovalFlag adds the flag of commands that can remove servers.
func (t *target) addRemovalFlag(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&t.allowRemovals, "allow-removals", false,
		"remove servers also above the limit of the store (store.max-removed-percent)")
}

func instanceFlag(cmd *cobra.Command, instance *string) {
	cmd.Flags().StringVarP(instance, "instance", "i", "",
		"`name` of the instance (default: the only one in this network namespace)")
}

// kind is what a command edits: services, or servers.
type kind struct {
	noun     string
	name     string // of the argument that names one
	example  string // such a name
	fields   string // fields of a new one, as an example
	settings string // fields to set, as an example
	// parse takes a name apart.
	parse func(ctx context.Context, client *api.Client, name string) (service, server string, err error)
	// names lists the names of all services.
	names func([]api.Service) []string
	list  func(out io.Writer, services []api.Service)
	field reflect.Type // the struct with the fields
}

var serviceKind = kind{
	noun: "service", name: "SERVICE", example: "web",
	fields:   "vip=2001:db8:80::1 port=80 protocol=tcp",
	settings: "placement=hunt timeouts.new=30s",
	parse: func(_ context.Context, _ *api.Client, name string) (service, server string, err error) {
		return name, "", nil
	},
	names: serviceNames,
	list:  listServices,
	field: reflect.TypeFor[desired.Service](),
}

var serverKind = kind{
	noun: "server", name: "SERVICE/SERVER", example: "web/s4",
	fields:   "locator=fd00:5:0:4::/64 weight=2",
	settings: "weight=10",
	parse:    parseServerName,
	names:    serverNames,
	list:     listServers,
	field:    reflect.TypeFor[desired.Server](),
}

func newService() *cobra.Command { return serviceKind.command() }

func newServer() *cobra.Command { return serverKind.command() }

// command returns the commands that list and edit services or servers.
func (k kind) command() *cobra.Command {
	cmd := &cobra.Command{
		Use:   k.noun + " list|add|set|remove|reset",
		Short: fmt.Sprintf("List and change the %ss of a running balancer", k.noun),
		Long: fmt.Sprintf(`List and change the %ss of a running balancer.

Changes are overrides: they hold across reloads and restarts, and leave the configuration
file as it is. segue status shows them apart from the file's content.`, k.noun),
	}
	cmd.AddCommand(k.listCommand(), k.addCommand(), k.setCommand(), k.removeCommand(), k.resetCommand())
	return cmd
}

func (k kind) listCommand() *cobra.Command {
	var instance string
	cmd := &cobra.Command{
		Use:   "list",
		Short: fmt.Sprintf("List the %ss with their overrides", k.noun),
		Args:  arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := clientOf(instance)
			if err != nil {
				return err
			}
			services, err := client.Services(cmd.Context())
			if err != nil {
				return err
			}
			k.list(cmd.OutOrStdout(), services)
			return nil
		},
	}
	instanceFlag(cmd, &instance)
	return cmd
}

func (k kind) addCommand() *cobra.Command {
	return k.editCommand(&cobra.Command{
		Use:   fmt.Sprintf("add %s FIELD=VALUE...", k.name),
		Short: fmt.Sprintf("Add a %s", k.noun),
		Long: fmt.Sprintf(`Add a %s. The fields are those of the configuration file. A dot leads to a field of a
section, as in timeouts.new=30s.`, k.noun),
		Example: fmt.Sprintf("  segue %s add %s %s", k.noun, k.example, k.fields),
	}, func(fields desired.Fields) api.Edit { return api.Edit{Override: api.Override{Add: fields}} })
}

func (k kind) setCommand() *cobra.Command {
	return k.editCommand(&cobra.Command{
		Use:   fmt.Sprintf("set %s FIELD=VALUE...", k.name),
		Short: fmt.Sprintf("Set fields of a %s", k.noun),
		Long: fmt.Sprintf(`Set fields of a %s. The fields are those of the configuration file. A dot leads to a field
of a section, as in timeouts.new=30s. FIELD= without a value removes the field, so that its
default holds.`, k.noun),
		Example: fmt.Sprintf("  segue %s set %s %s", k.noun, k.example, k.settings),
	}, func(fields desired.Fields) api.Edit { return api.Edit{Override: api.Override{Set: fields}} })
}

func (k kind) removeCommand() *cobra.Command {
	return k.editCommand(&cobra.Command{
		Use:   "remove " + k.name,
		Short: fmt.Sprintf("Remove a %s", k.noun),
		Long: fmt.Sprintf(`Remove a %s, also one of the configuration file. Its connections break: drain servers first.
Reset undoes the removal of a %s of the file.`, k.noun, k.noun),
		Example: fmt.Sprintf("  segue %s remove %s", k.noun, k.example),
	}, func(desired.Fields) api.Edit { return api.Edit{Override: api.Override{Remove: true}} })
}

func (k kind) resetCommand() *cobra.Command {
	what := "the overrides of a server"
	if k.noun == "service" {
		what = "the overrides of a service and of its servers"
	}
	return k.editCommand(&cobra.Command{
		Use:     "reset " + k.name,
		Short:   "Remove " + what,
		Long:    fmt.Sprintf("Remove %s: what the configuration file says holds again.", what),
		Example: fmt.Sprintf("  segue %s reset %s", k.noun, k.example),
	}, func(desired.Fields) api.Edit { return api.Edit{Reset: true} })
}

// editCommand completes a command whose first argument is a name, and whose other arguments are
// fields if its usage says so.
func (k kind) editCommand(cmd *cobra.Command, edit func(desired.Fields) api.Edit) *cobra.Command {
	var t target
	takesFields := strings.Contains(cmd.Use, "FIELD=VALUE")
	cmd.Args = arguments(k.name)
	if takesFields {
		cmd.Args = arguments(k.name, "FIELD=VALUE...")
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		fields, err := parseFields(args[1:])
		if err != nil {
			return err
		}
		return k.send(cmd.Context(), cmd.OutOrStdout(), &t, args[0], edit(fields))
	}
	cmd.ValidArgsFunction = func(
		cmd *cobra.Command, args []string, word string,
	) ([]string, cobra.ShellCompDirective) {
		switch {
		case len(args) == 0:
			return completeNames(cmd.Context(), t.instance, k.names), cobra.ShellCompDirectiveNoFileComp
		case takesFields:
			return completeFields(k.field, word),
				cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
		}
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	t.addFlags(cmd)
	t.addRemovalFlag(cmd)
	return cmd
}

// send sends an edit of the service or server with the name, and prints the changes.
func (k kind) send(ctx context.Context, out io.Writer, t *target, name string, e api.Edit) error {
	client, err := clientOf(t.instance)
	if err != nil {
		return err
	}
	if e.Service, e.Server, err = k.parse(ctx, client, name); err != nil {
		return err
	}
	client.AllowRemovals = t.allowRemovals
	changed, err := client.Change(ctx, t.dryRun, e)
	if err != nil {
		return err
	}
	printChanged(out, changed, t.dryRun)
	return nil
}

// printChanged prints the effect of a change.
func printChanged(out io.Writer, changed *api.Changed, dryRun bool) {
	if len(changed.Changes) == 0 {
		fmt.Fprintln(out, "nothing to change")
	}
	var changes desired.Changes
	for _, c := range changed.Changes {
		changes = append(changes, desired.Change{What: c.Kind, Names: c.Items})
	}
	for _, line := range changes.Lines() {
		if dryRun {
			line = "dry run: " + line
		}
		fmt.Fprintln(out, line)
	}
	for _, loss := range changed.Losses {
		fmt.Fprintln(out, describeLoss(&loss))
	}
	tellWarnings(out, changed.Warnings)
}

func describeLoss(l *api.Loss) string {
	flows := "an unknown number of flows"
	if l.Flows != nil {
		flows = plural.Count(int(*l.Flows), "live flow")
	}
	if l.Cause == string(desired.LossForgotten) {
		return fmt.Sprintf("%s/%s leaves the history with %s: a balancer that does not know them cannot "+
			"find their server", l.Service, l.Server, flows)
	}
	return fmt.Sprintf("%s/%s is removed with %s", l.Service, l.Server, flows)
}

func tellWarnings(out io.Writer, warnings []string) {
	for _, warning := range warnings {
		fmt.Fprintln(out, "warning:", warning)
	}
}

// parseFields reads arguments FIELD=VALUE.
func parseFields(args []string) (desired.Fields, error) {
	fields := desired.Fields{}
	for _, arg := range args {
		path, value, ok := strings.Cut(arg, "=")
		if !ok || path == "" {
			return nil, fmt.Errorf("%q: must be FIELD=VALUE, such as weight=10", arg)
		}
		into, names := map[string]any(fields), strings.Split(path, ".")
		for _, section := range names[:len(names)-1] {
			inner, ok := into[section].(map[string]any)
			if _, taken := into[section]; taken && !ok {
				return nil, fmt.Errorf("%q: %s has a value already", arg, section)
			}
			if !ok {
				inner = map[string]any{}
				into[section] = inner
			}
			into = inner
		}
		last := names[len(names)-1]
		if _, twice := into[last]; twice {
			return nil, fmt.Errorf("%q: %s is given twice", arg, path)
		}
		into[last] = parseValue(value)
	}
	return fields, nil
}

// parseValue returns a value of JSON. Numbers stay text, because the balancer reads numbers from text,
// and the digits of an ID must not change.
func parseValue(text string) any {
	switch text {
	case "":
		return nil
	case "true", "false":
		return text == "true"
	}
	return text
}

// parseServerName finds the server that is named SERVICE/SERVER. Both names may contain slashes. A
// name that no server has is taken apart at the last slash after a service's name.
func parseServerName(ctx context.Context, client *api.Client, name string) (service, server string, err error) {
	services, err := client.Services(ctx)
	if err != nil {
		return "", "", err
	}
	for _, s := range services {
		if rest, ok := strings.CutPrefix(name, s.Name+"/"); ok && rest != "" && len(s.Name) > len(service) {
			service, server = s.Name, rest
		}
		for _, of := range s.Servers {
			if s.Name+"/"+of.Name == name {
				return s.Name, of.Name, nil
			}
		}
	}
	if service != "" {
		return service, server, nil
	}
	service, server, ok := strings.Cut(name, "/")
	if !ok || server == "" {
		return "", "", fmt.Errorf("%q: must be SERVICE/SERVER, such as web/s1", name)
	}
	return service, server, nil // perhaps the service was removed
}

func serviceNames(services []api.Service) (names []string) {
	for _, s := range services {
		names = append(names, s.Name)
	}
	return names
}

func serverNames(services []api.Service) (names []string) {
	for _, service := range services {
		for _, server := range service.Servers {
			names = append(names, service.Name+"/"+server.Name)
		}
	}
	return names
}

// completeNames returns names of a balancer's services or servers for the completion of a shell.
func completeNames(ctx context.Context, instance string, names func([]api.Service) []string) []string {
	client, err := clientOf(instance)
	if err != nil {
		return nil
	}
	services, err := client.Services(ctx)
	if err != nil {
		return nil
	}
	return names(services)
}

// completeFields returns the fields of a struct that begin with a word, each with an equals sign.
func completeFields(of reflect.Type, word string) (words []string) {
	if strings.Contains(word, "=") {
		return nil
	}
	for _, path := range fieldPaths(of, "") {
		if strings.HasPrefix(path, word) {
			words = append(words, path+"=")
		}
	}
	return words
}

// fieldPaths returns the paths of all fields of a struct but its name and lists.
func fieldPaths(of reflect.Type, prefix string) (paths []string) {
	for _, f := range reflect.VisibleFields(of) {
		name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		inner := f.Type
		if inner.Kind() == reflect.Pointer {
			inner = inner.Elem()
		}
		switch {
		case name == "" || name == "-" || name == "name" || inner.Kind() == reflect.Slice:
		case inner.Kind() == reflect.Struct && inner.PkgPath() == of.PkgPath():
			paths = append(paths, fieldPaths(inner, prefix+name+".")...)
		default:
			paths = append(paths, prefix+name)
		}
	}
	return paths
}

func listServices(out io.Writer, services []api.Service) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "SERVICE\tVIP\tPORT\tPROTOCOL\tPLACEMENT\tPERSISTENCE\tENCAPSULATION\tSERVERS\tOVERRIDE")
	for _, s := range services {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\n", s.Name, s.VIP, s.Port, s.Protocol,
			s.Placement, s.Persistence, s.Encapsulation, len(s.Servers), orDash(s.Override))
	}
	w.Flush()
}

func listServers(out io.Writer, services []api.Service) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "SERVER\tADDRESS\tWEIGHT\tCONDITION\tFLOWS\tOVERRIDE")
	for _, s := range services {
		for _, server := range s.Servers {
			flows := "-"
			if server.Flows != nil {
				flows = strconv.FormatUint(server.Flows.Live, 10)
			}
			fmt.Fprintf(w, "%s/%s\t%s\t%d\t%s\t%s\t%s\n", s.Name, server.Name, server.Address,
				server.Weight, server.Condition, flows, orDash(server.Override))
		}
	}
	w.Flush()
}

func orDash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}
